"""Profiles whose times are simple numbers, and clusters to price plans on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetero.cost.cost_model import CostModel
from hetero.cost.runtime_model import HETERO_LAYERS
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.spec.model import ModelSpec
from hetero.spec.profile import LayerKind, LayerShape, LayerTime, Profile, ProfileStore, Provenance, UpdateTime

PROVENANCE = Provenance(measured_by="nobody", source="a test", licence="none")


def profile(
    model: ModelSpec,
    *,
    name: str = "synthetic",
    device: str = "A100-40",
    block_s: tuple[float, float] = (1.0, 2.0),
    ends_s: tuple[float, float] = (0.0, 0.0),
    update_s: float = 0.0,
    tps: Sequence[int] = (1, 2, 4),
    micro_batch_sizes: Sequence[int] = (1, 2, 4),
    **overrides: Any,
) -> Profile:
    """Of the layers that our runtime runs: each takes (forward, backward) seconds per sample, over tp; embedding and
    head take ``ends_s``."""
    seconds_of: Mapping[LayerKind, tuple[float, float]] = {"embedding": ends_s, "block": block_s, "head": ends_s}
    return Profile(
        **{
            "device": device,
            "model": name,
            "shape": LayerShape.of(model),
            "seq_length": 16,
            "precision": "fp32",
            "arithmetic": "fp32",
            "implementation": HETERO_LAYERS,
            "provenance": PROVENANCE,
            "times": tuple(
                LayerTime(
                    kind=kind,
                    tp=tp,
                    micro_batch_size=size,
                    forward_s=seconds[0] * size / tp,
                    backward_s=seconds[1] * size / tp,
                )
                for kind, seconds in seconds_of.items()
                for tp in tps
                for size in micro_batch_sizes
            ),
            "updates": tuple(UpdateTime(kind=kind, tp=tp, update_s=update_s) for kind in seconds_of for tp in tps),
            **overrides,
        }
    )


def cost_model(model: ModelSpec, profiles: Iterable[Profile], **arguments: Any) -> CostModel:
    """Of 16 tokens in fp32, as :func:`profile` measures."""
    store = ProfileStore(profiles)
    return CostModel(**{"model": model, "seq_length": 16, "precision": "fp32", "profiles": store, **arguments})


def nodes(
    count: int, *, gpus_per_node: int = 1, gb_per_s: float = 1.0, latency_us: float = 0.0, **overrides: Any
) -> ClusterSpec:
    """``count`` nodes of A100-40 whose devices and nodes are connected alike."""
    link = Link(bandwidth_gb_per_s=gb_per_s, latency_us=latency_us)
    node_type = NodeType(
        **{
            "name": "node",
            "device": "A100-40",
            "gpus_per_node": gpus_per_node,
            "count": count,
            "inside_node": link,
            **overrides,
        }
    )
    return ClusterSpec(node_types=(node_type,), links=Links(between_nodes=link))
