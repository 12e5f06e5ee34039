"""Reads the CSV tables of measurements that the authors of Sailor published into profiles and links.

A folder holds ``layer_profiles.csv``, ``layer_memory.csv``, ``collectives.csv``, ``p2p.csv`` and
``network_fits.csv``. Only the models whose sizes are known here are read.
"""

import csv
import dataclasses
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from hetero.cost.layers.work import layer_work
from hetero.data import NodeLinks, PublishedLinks
from hetero.errors import ConfigError
from hetero.serialization import read_text
from hetero.spec.cluster import NodePair, ZonePair
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import (
    LAYER_KINDS,
    Arithmetic,
    LayerKind,
    LayerMemory,
    LayerShape,
    LayerTime,
    Profile,
    Provenance,
    UpdateTime,
)
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GB

CsvRow = dict[str, str]

DEVICES = {
    "A100-40": "A100-40",
    "A100-80": "A100-80",
    "GH-96": "GH200",
    "RTX-2080": "RTX-2080Ti",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
    "V100-16": "V100-16",
}

NICS = {"A100-40": 3, "V100-16": 4, "GH-96": 4}
"""How many parallel transfers between two nodes reach the bandwidth of one: the fits of 4 pairs over those of 1."""

COEFFICIENTS = ("c2", "c1", "c0", "max_bytes_per_s")
"""Columns of ``network_fits.csv`` that make up a fit."""

DISAGREES = 2.0
"""Fits of one pair whose maxima are so many times apart are not of the same link. The fits of a pair for 1 to 8 GPUs
with one interface lie within 1 % of one another; a heuristic in between."""

MEGABYTE = 10**6

FAILED_MS = 1e9
"""What the tables hold where a collective did not run."""

ISOLATION_S = 1.9e-4
"""Calibrated on whole training runs, see docs/cost_model.md; straight lines through the times of small layers over the
microbatch size cut the axis at 0.1 to 0.2 ms."""

IN_A_STEP = 1.03
"""Calibrated with it; a device that computes for minutes runs into its power limit."""

UPDATE_DIVISOR = 4
"""By what the tables divide the time of an update, see :func:`_updates`."""

SEQ_LENGTH = 2048
PRECISION_BYTES = 4


def _shape(hidden: int, heads: int) -> LayerShape:
    return LayerShape(
        hidden=hidden,
        heads=heads,
        query_groups=heads,
        kv_channels=hidden // heads,
        ffn=4 * hidden,
        gated=False,
        vocabulary=50304,
    )


MODELS: dict[str, tuple[str, LayerShape, int]] = {
    "OPT-350": ("OPT-350M", _shape(1024, 16), 24),
    "GPT-Neo-2.7": ("GPT-Neo-2.7B", _shape(2560, 20), 32),
    "OPT-30": ("OPT-30B", _shape(7168, 56), 48),
}
"""By name in the tables: the common name, the layers' shape, the number of blocks."""

PROVENANCE = Provenance(
    measured_by="the authors of Sailor (SOSP 2025), ETH Zurich",
    source="https://github.com/eth-easl/sailor, August 2025",
    licence="MIT, Copyright (c) ETH Zurich, the Sailor authors",
    notes=(
        "fp32 in memory; matrix products in TF32 where the achieved throughput exceeds the device's fp32 peak",
        "each layer was timed alone; of the blocks, the median over all layers is kept",
        "the backward of the embedding was not timed",
        "updates were timed for an embedding, one or two blocks and a head together; here by parameters",
        "bandwidths contain the latency",
    ),
)


def read_profiles(folder: Path) -> list[Profile]:
    """Reads one profile per known model and device from the tables in ``folder``, sorted by device and model.

    Raises:
        ConfigError: a file is missing, has not the expected columns, or a cell is no number that can be.
    """
    with _errors_name(folder):
        return _profiles(folder)


def _profiles(folder: Path) -> list[Profile]:
    times = _grouped(
        _rows(folder / "layer_profiles.csv", {"model", "gpu", "micro_batch", "tp", "layer"}), "model", "gpu"
    )
    memory = _grouped(_rows(folder / "layer_memory.csv", {"model", "tp", "layer", "params_floats"}), "model")
    all_reduce = read_all_reduce(folder)
    profiles = []
    for (model, gpu), rows in sorted(times.items(), key=lambda item: (item[0][1], item[0][0])):
        if model in MODELS and gpu in DEVICES:
            # Collectives of the 80 GB card were not measured; the 40 GB one has the same NVLink.
            groups = all_reduce.get(gpu) or all_reduce.get(gpu.replace("A100-80", "A100-40"), ())
            profiles.append(_profile(model, gpu, rows, memory.get((model,), []), groups))
    return profiles


def _profile(
    model: str, gpu: str, rows: Sequence[CsvRow], memory_rows: Sequence[CsvRow], all_reduce: tuple[GroupLink, ...]
) -> Profile:
    name, shape, num_layers = MODELS[model]
    times = _times(rows, num_layers)
    memory = _memory(memory_rows, num_layers)
    head = next((entry for entry in memory if entry.kind == "head" and entry.tp == 1), None)
    return Profile(
        device=DEVICES[gpu],
        model=name,
        shape=shape,
        seq_length=SEQ_LENGTH,
        precision="fp32",
        arithmetic=_arithmetic(DEVICES[gpu], shape, times),
        head_has_projection=head is None or head.parameters >= shape.vocabulary * shape.hidden,
        isolation_s=ISOLATION_S,
        in_a_step=IN_A_STEP,
        provenance=PROVENANCE,
        times=times,
        updates=_updates(rows, memory),
        memory=memory,
        all_reduce=all_reduce,
    )


def _times(rows: Sequence[CsvRow], num_layers: int) -> tuple[LayerTime, ...]:
    passes: defaultdict[tuple[LayerKind, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        kind = _kind(int(row["layer"]), num_layers)
        passes[kind, int(row["tp"]), int(row["micro_batch"])].append((float(row["fwd_s"]), float(row["bwd_s"])))
    return tuple(
        LayerTime(
            kind=kind,
            tp=tp,
            micro_batch_size=size,
            forward_s=_rounded(median(forward for forward, _ in found)),
            backward_s=_rounded(median(backward for _, backward in found)),
        )
        for (kind, tp, size), found in sorted(passes.items())
    )


def _updates(rows: Sequence[CsvRow], memory: Sequence[LayerMemory]) -> tuple[UpdateTime, ...]:
    """Divides an update that was timed for several layers together among them, in proportion to their parameters.

    The tables give every layer of a model one and the same time. Heuristic: it is taken for that of the embedding, the
    profiled blocks and the head, divided by four, as only then a parameter costs the same in every model (A100-40: 90
    ps, V100-16: 149 ps).
    """
    num_blocks = _num_profiled_blocks(rows)
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if float(row["update_s"]) > 0:
            seconds[int(row["tp"])].append(float(row["update_s"]))
    updates = []
    for tp, found in sorted(seconds.items()):
        held = {entry.kind: entry.parameters for entry in memory if entry.tp == tp}
        if len(held) == len(LAYER_KINDS):
            together = held["embedding"] + num_blocks * held["block"] + held["head"]
            per_parameter = UPDATE_DIVISOR * median(found) / together
            updates += [
                UpdateTime(kind=kind, tp=tp, update_s=_rounded(per_parameter * held[kind])) for kind in sorted(held)
            ]
    return tuple(updates)


def _num_profiled_blocks(rows: Sequence[CsvRow]) -> int:
    """How many blocks were timed: 2 if the first two have different times; later ones are copies of the last timed."""
    first = {(r["tp"], r["micro_batch"]): (r["fwd_s"], r["bwd_s"]) for r in rows if r["layer"] == "1"}
    second = {(r["tp"], r["micro_batch"]): (r["fwd_s"], r["bwd_s"]) for r in rows if r["layer"] == "2"}
    return 1 if first == second else 2


def _memory(rows: Sequence[CsvRow], num_layers: int) -> tuple[LayerMemory, ...]:
    found: defaultdict[tuple[LayerKind, int], list[CsvRow]] = defaultdict(list)
    for row in rows:
        found[_kind(int(row["layer"]), num_layers), int(row["tp"])].append(row)
    return tuple(
        LayerMemory(
            kind=kind,
            tp=tp,
            parameters=int(median(int(row["params_floats"]) for row in layers)),
            saved_bytes=int(median(int(row["act_mem_bytes"]) for row in layers)),
            output_bytes=int(median(int(row["act_output_bytes"]) for row in layers)),
        )
        for (kind, tp), layers in sorted(found.items())
    )


def _kind(layer: int, num_layers: int) -> LayerKind:
    if layer == 0:
        return "embedding"
    return "block" if layer <= num_layers else "head"


def _arithmetic(device: str, shape: LayerShape, times: Iterable[LayerTime]) -> Arithmetic:
    """TF32 if the device has it, and its fp32 units could not be that fast or are as fast as TF32 anyway."""
    sheet = SHIPPED_DEVICES.of(device).data_sheet
    if sheet is None or sheet.tf32_tflops is None:
        return "fp32"
    achieved = max(
        layer_work(
            "block",
            shape,
            tp=time.tp,
            micro_batch_size=time.micro_batch_size,
            seq_length=SEQ_LENGTH,
            element_bytes=PRECISION_BYTES,
        ).operations
        / time.forward_s
        for time in times
        if time.kind == "block"
    )
    is_faster = achieved > sheet.flops_per_s("fp32")
    return "tf32" if is_faster or sheet.tf32_tflops <= sheet.fp32_tflops else "fp32"


def read_all_reduce(folder: Path) -> dict[str, tuple[GroupLink, ...]]:
    """Reads the fp32 all-reduces inside a node, by GPU name of the tables and in ascending group size.

    Raises:
        ConfigError: as :func:`read_profiles`.
    """
    rows = _rows(folder / "collectives.csv", {"gpu", "precision", "collective", "gpus", "data_mb", "median_time_ms"})
    points: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        milliseconds = float(row["median_time_ms"])
        if row["collective"] == "all_reduce" and row["precision"] == "fp32" and milliseconds < FAILED_MS:
            size, megabytes = int(row["gpus"]), int(float(row["data_mb"]))
            bus_gb_per_s = 2 * (size - 1) / size * megabytes / milliseconds
            points[row["gpu"], size][megabytes * MEGABYTE] = bus_gb_per_s
    groups: defaultdict[str, list[GroupLink]] = defaultdict(list)
    for (gpu, size), table in sorted(points.items()):
        bus = Link(bandwidth_gb_per_s=_thinned(table), latency_us=0)
        groups[gpu].append(GroupLink(size=size, bus=bus))
    return {gpu: tuple(found) for gpu, found in groups.items()}


def _thinned(table: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Keeps the measured sizes nearest to each power of two: the others lie on the lines between them."""
    sizes = sorted(table)
    powers = range(math.floor(math.log2(sizes[0])), math.ceil(math.log2(sizes[-1])) + 1)
    nearest = {min(sizes, key=lambda size, p=power: abs(math.log2(size) - p)) for power in powers}  # type: ignore[misc]  # the default binds it, and is no argument
    return tuple((size, _rounded(table[size])) for size in sorted(nearest))


def read_links(folder: Path) -> PublishedLinks:
    """Reads the links inside nodes, between nodes of equal and of different devices, and between two regions.

    Raises:
        ConfigError: as :func:`read_profiles`.
    """
    with _errors_name(folder):
        return _links(folder)


def _links(folder: Path) -> PublishedLinks:
    inside: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in _rows(folder / "p2p.csv", {"gpu", "precision", "scope", "data_mb", "bandwidth_raw"}):
        if row["scope"] == "intra" and row["precision"] == "fp32":
            inside[row["gpu"]].append((int(row["data_mb"]) * MEGABYTE, _rounded(float(row["bandwidth_raw"]))))
    columns = {"scope", "src_zone", "src_gpu", "src_gpus", "dst_zone", "dst_gpu", "dst_gpus", *COEFFICIENTS}
    fits = [row for row in _rows(folder / "network_fits.csv", columns) if row["scope"] == "inter"]
    chosen, replaced = without_placeholders(fits)
    between = {(r["src_zone"], r["src_gpu"], r["dst_zone"], r["dst_gpu"]): _fit(r) for r in chosen}
    all_reduce = read_all_reduce(folder)
    home, far = "us-central1-a", "us-west1-b"
    nodes = tuple(
        NodeLinks(
            device=DEVICES[gpu],
            inside_node=Link(bandwidth_gb_per_s=tuple(sorted(table)), latency_us=0),
            all_reduce_inside_node=all_reduce.get(gpu, ()),
            between_nodes=between.get((home, gpu, home, gpu)),
            nics_per_node=NICS.get(gpu, 1),
        )
        for gpu, table in sorted(inside.items())
    )
    pairs = tuple(
        NodePair(node_types=(DEVICES[a], DEVICES[b]), link=link)
        for (zone_a, a, zone_b, b), link in sorted(between.items(), key=lambda item: item[0])
        if zone_a == zone_b == home and a < b and {a, b} <= set(DEVICES)
    )
    zones = tuple(
        ZonePair(zones=("us-central1", "us-west1"), link=link)
        for (zone_a, a, zone_b, b), link in sorted(between.items(), key=lambda item: item[0])
        if (zone_a, zone_b) == (home, far) and a == b == "A100-40"
    )
    provenance = dataclasses.replace(PROVENANCE, notes=(*PROVENANCE.notes, *replaced))
    return PublishedLinks(provenance=provenance, nodes=nodes, pairs=pairs, zones=zones)


def without_placeholders(fits: Sequence[CsvRow]) -> tuple[list[CsvRow], tuple[str, ...]]:
    """The fits between one GPU on either side, with a fit of their own for pairs that carry another pair's.

    A link has two ends, and the slower one decides: the fit of two unlike devices may equal that of either with its own
    kind. One that equals the fit of a pair with a third device, while another fit of the same two devices says
    ``DISAGREES`` times as much or as little, was never measured: it is a placeholder. In its place comes the fit of the
    same two devices with the fewest GPUs, in either direction, that is no such copy, per network interface.

    Args:
        fits: rows of ``network_fits.csv`` between nodes, of all numbers of GPUs.

    Returns:
        the rows, and a note on each that was replaced.
    """
    of_pair: defaultdict[tuple[str, ...], list[CsvRow]] = defaultdict(list)
    carriers: defaultdict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for row in fits:
        of_pair[_ends(row)].append(row)
        carriers[_coefficients(row)].add(_devices(row))
    chosen: list[CsvRow] = []
    notes: dict[str, None] = {}
    for row in fits:
        if not row["src_gpus"] == row["dst_gpus"] == "1":
            continue
        devices = _devices(row)
        foreign = _foreign(devices, carriers[_coefficients(row)])
        own = [other for other in of_pair[_ends(row)] if not _foreign(devices, carriers[_coefficients(other)])]
        if foreign and any(_disagree(row, other) for other in own):
            instead = min(own, key=lambda other: (_num_gpus(other), _coefficients(other)))
            note = (
                f"{' with '.join(DEVICES.get(gpu, gpu) for gpu in devices)}, between nodes: the fit for one GPU "
                f"({_gb_per_s(row):.3g} GB/s) is that of pairs with {', '.join(DEVICES.get(g, g) for g in foreign)}; "
                f"replaced by the pair's own for {_num_gpus(instead)} GPUs ({_gb_per_s(instead):.3g} GB/s)"
            )
            notes[note] = None
            row = {**row, **{name: str(float(instead[name]) / _interfaces(instead)) for name in COEFFICIENTS}}
        chosen.append(row)
    return chosen, tuple(notes)


def _ends(row: CsvRow) -> tuple[str, ...]:
    """Zone and device of both ends, in one order."""
    return tuple(sorted((f"{row['src_zone']} {row['src_gpu']}", f"{row['dst_zone']} {row['dst_gpu']}")))


def _devices(row: CsvRow) -> tuple[str, ...]:
    """The devices of both ends, once where they are alike, in one order."""
    return tuple(sorted({row["src_gpu"], row["dst_gpu"]}))


def _foreign(devices: tuple[str, ...], carriers: set[tuple[str, ...]]) -> list[str]:
    """The third devices that a fit of ``devices`` must be from, by all the pairs that carry it; empty if it may be its
    own: one of equal devices is, and so is what one of the two ends has with its own kind."""
    if len(devices) == 1 or any((device,) in carriers for device in devices):
        return []
    return sorted({device for pair in carriers for device in pair}.difference(devices))


def _coefficients(row: CsvRow) -> tuple[str, ...]:
    return tuple(row[name] for name in COEFFICIENTS)


def _num_gpus(row: CsvRow) -> int:
    """GPUs that send at once."""
    return min(int(row["src_gpus"]), int(row["dst_gpus"]))


def _interfaces(row: CsvRow) -> int:
    """Network interfaces that the transfers of a fit are spread over."""
    return min(_num_gpus(row), *(NICS.get(gpu, 1) for gpu in _devices(row)))


def _gb_per_s(row: CsvRow) -> float:
    """The bandwidth of one interface that a fit says large messages have."""
    return float(row["max_bytes_per_s"]) / GB / _interfaces(row)


def _disagree(a: CsvRow, b: CsvRow) -> bool:
    slower, faster = sorted((_gb_per_s(a), _gb_per_s(b)))
    return faster > DISAGREES * slower


def _fit(row: CsvRow) -> Link:
    """Tabulates a published fit at 1 MB to 1 GB: GB/s = c2 m^2 + c1 m + c0, m = log2(megabytes), up to a maximum."""
    c2, c1, c0 = (float(row[name]) for name in ("c2", "c1", "c0"))
    ceiling = float(row["max_bytes_per_s"]) / GB
    table = []
    for m in range(11):
        bandwidth = min(c2 * m * m + c1 * m + c0, ceiling)
        if bandwidth > 0:
            table.append((2**m * MEGABYTE, _rounded(bandwidth)))
    return Link(bandwidth_gb_per_s=tuple(table), latency_us=0)


def _rounded(value: float) -> float:
    """Four significant digits, more than the measurements have.

    Raises:
        ValueError: not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} was measured")
    return float(f"{value:.4g}")


@contextmanager
def _errors_name(folder: Path) -> Iterator[None]:
    """Turns the exceptions of cells that are no numbers, or impossible ones, into an error that names the folder."""
    try:
        yield
    except ConfigError as error:
        raise error if str(folder) in str(error) else ConfigError(f"{folder}: {error}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"{folder}: a cell of its tables is no number that can be: {type(error).__name__}: {error}; "
            "fetch the published tables anew"
        ) from None


def _rows(path: Path, columns: set[str]) -> list[CsvRow]:
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give the folder that holds the published tables")
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path))))
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}") from None
    if missing := columns - set(rows[0] if rows else {}):
        raise ConfigError(f"{path}: has no column {', '.join(sorted(missing))}; is it the published table?")
    return rows


def _grouped(rows: Iterable[CsvRow], *keys: str) -> dict[tuple[str, ...], list[CsvRow]]:
    groups: defaultdict[tuple[str, ...], list[CsvRow]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return groups
