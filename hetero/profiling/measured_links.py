"""Describes links as transfers between ranks have shown them: latency and bandwidth, as a cluster file takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from hetero.profiling.figures import rounded
from hetero.serialization import STRICT
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import Provenance
from hetero.units import GB, US_PER_S

Operation = Literal["send", "all_reduce", "all_gather", "reduce_scatter", "broadcast"]

COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTransfer:
    """Seconds of one operation among some ranks, by its bytes.

    nodes, devices: of the ranks, in their order.
    times: (bytes, seconds). Bytes are those of a message; of an all-reduce or a broadcast, what every rank holds; of
        an all-gather what it ends with, and of a reduce-scatter what it begins with.
    fit: latency and bandwidth of the line t = latency + bytes / bandwidth, with the least relative errors.
    worst_error: of the line, as a part of what was measured. Where it is large, one bandwidth does not say it all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    operation: Operation
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    times: tuple[tuple[int, float], ...]
    fit: Link
    worst_error: float

    @property
    def is_inside_node(self) -> bool:
        return len(set(self.nodes)) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksInsideNode:
    """What a node type of a cluster file says under the same names, of nodes with ``device``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: str
    inside_node: Link
    all_reduce_inside_node: tuple[GroupLink, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBetweenNodes:
    """What a cluster file says under ``links``, between nodes with these devices."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    devices: tuple[str, str]
    link: Link


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLinks:
    """Links of a launch: what a cluster file takes over, and all that was measured."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[1] = 1
    provenance: Provenance
    inside_nodes: tuple[LinksInsideNode, ...] = ()
    between_nodes: tuple[LinkBetweenNodes, ...] = ()
    transfers: tuple[MeasuredTransfer, ...]


def measured_links(transfers: Sequence[MeasuredTransfer], provenance: Provenance) -> MeasuredLinks:
    """Sort what was measured into what a cluster file asks for."""
    sends = [each for each in transfers if each.operation == "send"]
    return MeasuredLinks(
        provenance=provenance,
        inside_nodes=tuple(
            LinksInsideNode(
                device=each.devices[0],
                inside_node=each.fit,
                all_reduce_inside_node=tuple(_group_links(each.devices[0], transfers)),
            )
            for each in sends
            if each.is_inside_node
        ),
        between_nodes=tuple(
            LinkBetweenNodes(devices=(each.devices[0], each.devices[1]), link=each.fit)
            for each in sends
            if not each.is_inside_node
        ),
        transfers=tuple(transfers),
    )


def _group_links(device: str, transfers: Sequence[MeasuredTransfer]) -> list[GroupLink]:
    """By size, with the bandwidth of the bus as nccl-tests define it; latency is part of it."""
    return [
        GroupLink(size=len(each.ranks), bus=Link(bandwidth_gb_per_s=_bus(each), latency_us=0.0))
        for each in sorted(transfers, key=lambda each: len(each.ranks))
        if each.operation == "all_reduce" and each.is_inside_node and each.devices[0] == device
    ]


def _bus(all_reduce: MeasuredTransfer) -> tuple[tuple[int, float], ...]:
    size = len(all_reduce.ranks)
    return tuple((num_bytes, rounded(2 * (size - 1) / size * num_bytes / s / GB)) for num_bytes, s in all_reduce.times)


def fit_link(times: Sequence[tuple[int, float]]) -> tuple[Link, float]:
    """The line t = latency + bytes / bandwidth through ``times`` with the least squares of relative errors.

    Neither is below 0: where the best line has no latency, the best one through the origin.

    Args:
        times: (bytes, seconds) of at least two sizes.

    Returns:
        the link, and the worst relative error of the line.
    """
    sizes, seconds = np.array([each[0] for each in times], dtype=float), np.array([each[1] for each in times])
    ones, scaled = 1 / seconds, sizes / seconds
    latency_s, s_per_byte = np.linalg.lstsq(np.column_stack([ones, scaled]), np.ones(len(times)), rcond=None)[0]
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, scaled.sum() / (scaled @ scaled)
    if s_per_byte <= 0:
        # Large messages were no slower than small ones: the largest one is the most that was seen.
        latency_s, s_per_byte = float(seconds.min()), float(seconds[-1] / sizes[-1])
    worst = float(np.max(np.abs(latency_s * ones + s_per_byte * scaled - 1)))
    link = Link(bandwidth_gb_per_s=rounded(1 / float(s_per_byte) / GB), latency_us=rounded(float(latency_s) * US_PER_S))
    return link, rounded(worst)
