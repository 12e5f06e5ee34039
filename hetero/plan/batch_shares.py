"""Divides another global batch among the replicas of a plan, for steps of a changing batch and for evaluations.

A replica takes whole microbatches of each of its stages, so its share is a multiple of a unit, the least common
multiple of the samples of their microbatches. Replicas of one unit divide what they have by largest remainders of their
shares of the whole batch; of different units, the larger ones take what comes nearest to theirs as long as the others
can take the rest. (A heuristic: nothing is simulated.)
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

from hetero.errors import PlanError
from hetero.plan.communicators import PlanCommunicators
from hetero.plan.ir import Plan, Replica
from hetero.plan.validate import check_in_flight_is_deep_enough


def with_batch_size(plan: Plan, size: int) -> Plan:
    """The plan for steps of ``size`` samples: every replica trains, on about the same part of the batch as in ``plan``.

    It differs from ``plan`` in ``global_batch_size`` and in ``num_samples`` of its replicas, and in no rank's tensors.

    Raises:
        PlanError: no multiples of the replicas' units add up to ``size``.
    """
    units = [_unit(replica) for replica in plan.replicas]
    shares = _shares(size, units, [replica.num_samples for replica in plan.replicas])
    if shares is None:
        raise PlanError(f"plan: {len(units)} replicas with shares in multiples of {units} cannot share {size} samples")
    replicas = tuple(
        dataclasses.replace(replica, num_samples=share) for replica, share in zip(plan.replicas, shares, strict=True)
    )
    return dataclasses.replace(plan, global_batch_size=size, replicas=replicas)


def check_batch_sizes(plan: Plan, sizes: Sequence[int], *, flag: str) -> None:
    """Check that ``plan`` can run batches of every size, before the first of them runs.

    Args:
        sizes: other than that of ``plan``, ascending.
        flag: that asks for them, with its value.

    Raises:
        PlanError: it cannot share batches of some sizes, which the message names, or deadlocks at one.
    """
    units = [_unit(replica) for replica in plan.replicas]
    weights = [replica.num_samples for replica in plan.replicas]
    if bad := [size for size in sizes if _shares(size, units, weights) is None]:
        every, fewest = math.lcm(*units), len(units)
        possible = (
            f"sizes that {every} divides, of at least {every * fewest}, are possible, or lower the micro batch sizes"
            if every > 1
            else f"sizes of at least {fewest} are possible"
        )
        raise PlanError(
            f"{flag}: {_counted(len(units), 'replica')} cannot share "
            f"{'batches' if len(bad) > 1 else 'a batch'} of {_listed(bad)} samples, as each takes at least one whole "
            f"microbatch of its stages, multiples of {_listed(sorted(set(units)))}; {possible}"
        )
    full = _boundaries(plan)
    for size in sizes:
        other = with_batch_size(plan, size)
        try:
            check_in_flight_is_deep_enough(other)
        except PlanError as error:
            raise PlanError(f"{flag}: in batches of {size} samples, {error}") from error
        if not full <= _boundaries(other):
            raise PlanError(
                f"{flag}: in batches of {size} samples, interleaved stages send in another order than they receive; "
                "choose sizes with a multiple of as many microbatches as a pipeline has ranks"
            )


def _unit(replica: Replica) -> int:
    return math.lcm(*(stage.samples_per_microbatch for stage in replica.stages))


def _boundaries(plan: Plan) -> set[tuple[int, int, bool]]:
    """By replica and stage, the directions whose communicator serves several boundaries: slices keep an order there."""
    if not any(replica.is_interleaved for replica in plan.replicas):
        return set()
    return {
        (*key, forward)
        for key, both in PlanCommunicators(plan).boundaries.items()
        for forward, each in ((True, both.forward), (False, both.backward))
        if each.sender is None
    }


def _shares(size: int, units: Sequence[int], weights: Sequence[int]) -> list[int] | None:
    """Multiples of the units, at least one of each, that add up to ``size``, near to shares by ``weights``."""
    by_unit: dict[int, list[int]] = defaultdict(list)
    for r, unit in enumerate(units):
        by_unit[unit].append(r)
    groups = sorted(by_unit.items(), reverse=True)
    counts = _counts(size, [(unit, len(rs), sum(weights[r] for r in rs)) for unit, rs in groups])
    if counts is None:
        return None
    shares = [0] * len(units)
    for (unit, rs), count in zip(groups, counts, strict=True):
        for r, each in zip(rs, _largest_remainders(count, [weights[r] for r in rs]), strict=True):
            shares[r] = unit * each
    return shares


def _counts(size: int, groups: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """How many units each group takes of ``size`` samples.

    Args:
        groups: of replicas with one unit: the unit, how many replicas they are, and the sum of their weights.
    """
    failed: set[tuple[int, int]] = set()

    def rest(at: int, left: int) -> list[int] | None:
        """Of the groups from ``at`` on."""
        if at == len(groups):
            return [] if left == 0 else None
        later = groups[at + 1 :]
        if (at, left) in failed or left % math.gcd(*(unit for unit, _, _ in groups[at:])):
            return None
        unit, fewest, weight = groups[at]
        most = (left - sum(other * few for other, few, _ in later)) // unit
        wanted = Fraction(left * weight, unit * sum(each for _, _, each in groups[at:]))
        for count in _nearest(wanted, fewest, most) if later else [left // unit] if most >= fewest else []:
            if (found := rest(at + 1, left - count * unit)) is not None:
                return [count, *found]
        failed.add((at, left))
        return None

    return rest(0, size)


def _nearest(wanted: Fraction, fewest: int, most: int) -> Iterator[int]:
    """The whole numbers from ``fewest`` to ``most``, those nearest to ``wanted`` first."""
    if most < fewest:
        return
    low = min(max(math.floor(wanted), fewest), most)
    high = low + 1
    while low >= fewest or high <= most:
        if high > most or (low >= fewest and wanted - low <= high - wanted):
            yield low
            low -= 1
        else:
            yield high
            high += 1


def _largest_remainders(count: int, weights: Sequence[int]) -> list[int]:
    """``count`` whole things by ``weights``, at least one each: first the whole parts, then the largest remainders."""
    each = [max(1, count * weight // sum(weights)) for weight in weights]

    def short(i: int) -> int:
        """By how much, in parts of the sum of weights."""
        return count * weights[i] - each[i] * sum(weights)

    for i in sorted(range(len(each)), key=short, reverse=True)[: max(0, count - sum(each))]:
        each[i] += 1
    while sum(each) > count:
        # Those that had to have one took it from somebody.
        each[min((i for i, number in enumerate(each) if number > 1), key=short)] -= 1
    return each


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


_MOST_LISTED = 8


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return shown if len(numbers) <= _MOST_LISTED else f"{shown} and {len(numbers) - _MOST_LISTED} more"
