"""Says which CUDA streams a rank has besides those of its communicators: one per role, shared by all that copy.

A stream runs what is given to it in order. Work that waits for an event holds up all that is given to the stream later,
so a role is shared only where that cannot close a circle: no rank may wait for a message whose sender waits, over any
number of steps, for work that is queued after the receive. What a role may wait for decides it:

* ``READY_IN`` waits for nothing: what it copies lies ready on the host.
* ``GATHERS`` waits for the update of the step before, for ``READY_IN``, and for gathers. All ranks start their gathers
  in one order, and none waits for a compute of the next step.
* ``FETCHES_IN`` and ``COMPUTED_OUT`` wait for computes that the host has issued, and by these for pending receives.
  What waits for them are later computes of the same rank, or a thread that issues no message. A receive depends on
  nothing that its own rank issues after it (the program is replayed for that when a plan is validated).
* ``SUMS`` waits for issued computes, ``SUMMED_OUT`` for these and for sums. All ranks start their sums in one order.
* ``SUM_PHASES`` waits for issued computes and for the phases before, which all ranks start in one order.
* ``STATE_OUT`` waits for a whole step, and the next update waits for it.

So ``READY_IN`` and ``GATHERS`` are apart from the others: given after a copy that waits for a receive, a gather would
hold up the rank that is to send the message. Sums are apart from computed copies, since these would wait for other
replicas.
"""

from collections.abc import Iterable
from enum import Enum, auto

from hetero.plan.ir import Plan, Stage


class StreamRole(Enum):
    """What a stream is for."""

    READY_IN = auto()
    """Microbatches, and weights that the host has updated, to the device."""
    GATHERS = auto()
    """Gathers that a thread starts, and the copy of gathered weights to the host."""
    FETCHES_IN = auto()
    """Weights and activations of the blocks that computes need next, from the host."""
    COMPUTED_OUT = auto()
    """Activations and gradients that computes have left, to the host."""
    SUMS = auto()
    """Sums that a thread starts, with gradients that come from the host for them."""
    SUMMED_OUT = auto()
    """Summed gradients, to the host that updates by them."""
    SUM_PHASES = auto()
    """Phases of hierarchical sums and gathers, one after the other."""
    STATE_OUT = auto()
    """The state of a rank, to be saved or copied to another node."""


COMPUTES_AND_GROUP_OF_ONE = 2
"""Streams of a rank that have no role: that of its computes, and that of the group which it is in alone, over which
megatron-core's cross entropy reduces where tp is 1."""


def stream_roles(stages: Iterable[Stage], *, sums_in_phases: bool) -> frozenset[StreamRole]:
    """Return the roles for which a rank that holds ``stages`` has a stream.

    Args:
        sums_in_phases: gradients are summed hierarchically.
    """
    roles = {StreamRole.READY_IN, StreamRole.STATE_OUT}
    if sums_in_phases:
        roles.add(StreamRole.SUM_PHASES)
    for stage in stages:
        if stage.offload.optimizer_from is not None:
            roles |= {StreamRole.GATHERS, StreamRole.SUMMED_OUT}
        if stage.offload.gradients_from is not None:
            roles |= {StreamRole.COMPUTED_OUT, StreamRole.SUMS}
        if stage.offload.weights_from is not None:
            roles.add(StreamRole.FETCHES_IN)
        if stage.offload.activations_until is not None:
            roles |= {StreamRole.COMPUTED_OUT, StreamRole.FETCHES_IN}
    return frozenset(roles)


def other_streams(plan: Plan) -> int:
    """Return the most streams that a rank of ``plan`` has besides those of its communicators of two or more ranks."""
    phases = bool(plan.gradient_sync.domains)
    held = {
        tuple(replica.stages[s].offload for s in group): [replica.stages[s] for s in group]
        for replica in plan.replicas
        for group in replica.device_groups
    }
    return COMPUTES_AND_GROUP_OF_ONE + max(len(stream_roles(stages, sums_in_phases=phases)) for stages in held.values())
