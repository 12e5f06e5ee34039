"""Plans in float64 whose ranks hold several stages."""

import dataclasses

from hetero.plan.ir import Plan
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, sharded, stage, with_shares


def in_float64(made: Plan) -> Plan:
    return dataclasses.replace(made, precision="fp64")


def two_groups() -> Plan:
    """Two stages on each of two ranks, five microbatches in rounds of two."""
    cuts, depths = ((0, 2), (2, 3), (3, 5), (5, 6)), (3, 2, 2, 1)
    stages = (
        stage(layers=cut, ranks=(s % 2,), depth=depth) for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
    )
    return plan(llama_model(), [replica(*stages, num_samples=5)])


def unequal_tp() -> Plan:
    """Experts, split backwards on one group, three stages on the other."""
    one = {"ranks": (0, 1), "tp": 2, "sp": True, "delay": 1}
    other = {"ranks": (2,)}
    stages = (
        stage(layers=(0, 1), depth=3, **one),
        stage(layers=(1, 2), depth=3, **other),
        stage(layers=(2, 4), depth=2, **one),
        stage(layers=(4, 5), depth=2, **other),
        stage(layers=(5, 6), depth=1, **one),
    )
    return plan(moe_model(), [replica(*stages, num_samples=4)])


def tied_halves() -> Plan:
    """A tied embedding on two groups, cuts inside of layers, data parallelism, unequal shares of the optimizer."""
    cuts, depths = ((0, 1.5), (1.5, 3), (3, 4.5), (4.5, 6)), (2, 2, 2, 1)
    stages = [
        stage(layers=cut, ranks=((0, 1), (2, 3))[s % 2], dp=2, depth=depth)
        for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
    ]
    return sharded(with_shares(plan(gpt2_model(), [replica(*stages, num_samples=8)]), (1, 2)))


def beside_another() -> Plan:
    """Of two replicas one interleaves; the other has tensor parallelism, other cuts and one stage per rank."""
    cuts, depths = ((0, 1), (1, 4), (4, 5), (5, 6)), (3, 2, 2, 1)
    interleaved = replica(
        *(
            stage(layers=cut, ranks=(3 + s % 2,), depth=depth)
            for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
        ),
        num_samples=4,
    )
    other = replica(
        stage(layers=(0, 3), ranks=(0, 2), tp=2, sp=True), stage(layers=(3, 6), ranks=(1,), mbs=2), num_samples=4
    )
    return plan(gpt2_model(), [interleaved, other], idle_ranks=(5,))


PLANS = {
    "two-groups": in_float64(two_groups()),
    "unequal-tp": in_float64(unequal_tp()),
    "tied-halves": in_float64(tied_halves()),
    "beside-another": in_float64(beside_another()),
    "beside-another-sharded": in_float64(sharded(beside_another())),
}
