"""Small problems with synthetic profiles and links, drawn from a seed: what the exhaustive search can look at whole."""

import random

from hetero.cost.cost_model import CostModel
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.spec.profile import LayerTime, Profile, ProfileStore
from tests.helpers.synthetic_profiles import profile
from tests.unit.planner.clusters import opt_model

DEVICES = ("A100-40", "V100-16", "GH200")
SEQ_LENGTH = 512


def random_problem(seed: int, *, gpus: tuple[int, ...], num_layers: int, batch: int) -> Problem:
    """One node per device type with ``gpus`` devices each.

    A device is up to four times as fast as another one, loses up to 40 % of each doubling to tensor parallelism, and
    takes up to half a sample's time per microbatch anyway; it has 4, 8 or 16 GiB. Nodes are 1 to 20 GB/s apart.
    """
    chance = random.Random(seed)
    types, profiles = [], []
    for device, count in zip(DEVICES, gpus, strict=False):
        profiles.append(_profile(chance, device, num_layers))
        inside = Link(bandwidth_gb_per_s=chance.uniform(10, 200), latency_us=10)
        types.append(
            NodeType(
                name=device,
                device=device,
                gpus_per_node=count,
                memory_gib=chance.choice((4, 8, 16)),
                inside_node=inside,
            )
        )
    between = Link(bandwidth_gb_per_s=10 ** chance.uniform(0, 1.3), latency_us=20)
    costs = CostModel(
        model=opt_model(num_layers, 1024, 16), seq_length=SEQ_LENGTH, precision="fp32", profiles=ProfileStore(profiles)
    )
    return Problem(
        cluster=ClusterSpec(node_types=tuple(types), links=Links(between_nodes=between)),
        costs=costs,
        global_batch_size=batch,
    )


def _profile(chance: random.Random, device: str, num_layers: int) -> Profile:
    block_s = 0.01 * 4 ** chance.random()
    head_s = block_s * chance.uniform(0.2, 2)
    speedup, fixed = chance.uniform(0.6, 1.0), chance.uniform(0.0, 0.5)
    times = tuple(
        LayerTime(
            kind=kind,
            tp=tp,
            micro_batch_size=size,
            forward_s=seconds * (fixed + size) / tp**speedup,
            backward_s=2 * seconds * (fixed + size) / tp**speedup,
        )
        for kind, seconds in (("embedding", head_s / 10), ("block", block_s), ("head", head_s))
        for tp in (1, 2, 4)
        for size in (1, 2, 4, 8, 16)
    )
    return profile(
        opt_model(num_layers, 1024, 16),
        name=device,
        device=device,
        times=times,
        update_s=block_s / 5,
        seq_length=SEQ_LENGTH,
    )
