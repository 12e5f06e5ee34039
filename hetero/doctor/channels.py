"""Sends a first message over every channel of a plan, as its first step would, one after the other."""

import torch

from hetero.distributed.p2p import Channel
from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.plan.ir import Plan, Stage
from hetero.plan.reshard import num_phases


def first_messages(plan: Plan, *, device: torch.device) -> int:
    """Create the groups of ``plan`` and carry a microbatch of one hidden channel across every boundary, there and back.

    Collective over the world. Returns how many directions of boundaries this rank has sent or received on.

    Raises:
        RuntimeError: what arrived is not what was sent.
    """
    context = create_groups(plan, device=device)
    arrived = [
        _exchange(context, replica, boundary, forward=forward)
        for replica in range(len(plan.replicas))
        for boundary in range(len(plan.replicas[replica].stages) - 1)
        for forward in (True, False)
    ]
    # Not before all have been sent: another rank would wait for those of this one.
    if wrong := [each for each in arrived if isinstance(each, str)]:
        raise RuntimeError("; ".join(wrong))
    return sum(each for each in arrived if isinstance(each, bool))


def _exchange(context: ParallelContext, replica: int, boundary: int, *, forward: bool) -> bool | str:
    """Of one direction: whether this rank takes part in it, or what went wrong."""
    here, after = context.plan.replicas[replica].stages[boundary : boundary + 2]
    sender, receiver = (here, after) if forward else (after, here)
    groups = None
    for work in context.stages:
        if work.placement.replica == replica and work.placement.stage in (boundary, boundary + 1):
            groups = work.after if work.placement.stage == boundary else work.before
    if groups is None:
        return False
    channel = Channel(
        sender=sender,
        receiver=receiver,
        rank=context.rank,
        seq_length=context.plan.seq_length,
        group=groups.forward if forward else groups.backward,
    )
    # All slices of one microbatch of the stage that has the larger ones.
    for number in range(num_phases(sender, receiver)):
        if context.rank in sender.ranks:
            channel.send(_microbatch(sender, context, 1.0), number=number).wait()
    if context.rank in receiver.ranks:
        arrived = _microbatch(receiver, context, 0.0)
        for number in range(num_phases(sender, receiver)):
            channel.receive(arrived, number=number).wait()
        if not bool((arrived == 1).all()):
            direction = "forward" if forward else "backward"
            return f"replica {replica} boundary {boundary}, {direction}: rank {context.rank} received something else"
    return True


def _microbatch(stage: Stage, context: ParallelContext, value: float) -> torch.Tensor:
    """[S of this rank, B, 1]."""
    rows = context.plan.seq_length // (stage.tp if stage.splits_sequence else 1)
    return torch.full((rows, stage.micro_batch_size, 1), value, device=context.device)
