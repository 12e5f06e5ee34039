"""Runs every kernel of a rank's computes once, before the rank posts its first receive.

A receive of NCCL is a kernel that spins on the device until its message comes. Whoever compiles or loads one at its
first call may have to wait for the device, and so for that message, which the other rank may send only after it has
heard from this one: a training that stands still in its first step. After the warm-up, the computes of a step call
nothing for the first time, torch.compile's fusions included, and it does not matter whether CUDA loads kernels lazily.

Experts get another number of tokens in every microbatch. What torch's compiler makes for them serves all numbers
(:func:`hetero.runtime.mcore.compile_experts_once`), but cuBLAS chooses kernels by that number: with experts,
pretrain_gpt.py has all kernels loaded when the process starts (``CUDA_MODULE_LOADING=EAGER``). The CUDA C++ Programming
Guide, "Lazy Loading", describes this deadlock and both remedies.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime.grad_sync import GradientSync
from hetero.runtime.mcore import clear_auxiliary_losses, dropout_state, restore_dropout_state
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.stage_runner import StageRunner
from hetero.runtime.weight_gather import WeightGather


def warm_up(
    context: ParallelContext,
    stages: Sequence[StageRunner],
    *,
    sums: GradientSync,
    gather: WeightGather,
    loss_scale: Callable[[torch.Tensor], torch.Tensor],
    forwards_again: bool,
) -> None:
    """Run forward and backward of each stage on a made-up microbatch, and what goes with them, without a message.

    Weights, random generators, and whatever else modules remember are as before; gradients are zero.

    Collective over each stage's tensor-parallel group, whose ranks have the same stages in the same order.

    Args:
        loss_scale: makes the scale of the loss from the number of loss tokens.
        forwards_again: the schedule has forwards whose graph is made by a second one.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=context.device)
    with _state_kept([stage.module for stage in stages]):
        for stage in stages:
            loss = stage.warm_up(
                _made_up_microbatch(context) if stage.reads_data else None,
                lambda: loss_scale(nothing),
                forwards_again=forwards_again,
            )
            if loss is not None:
                nothing.clone().add_(loss)
        sums.warm_up()
        gather.warm_up()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def _made_up_microbatch(context: ParallelContext) -> Microbatch:
    assert context.work is not None, "an idle rank has no stages"
    shape = (context.work.stage.micro_batch_size, context.plan.seq_length)
    positions = torch.arange(context.plan.seq_length, device=context.device).expand(shape).contiguous()
    # Unlike tokens go to unlike experts: a kernel whose variants are timed at its first call has work to do then.
    tokens = positions % context.plan.model.vocab_size
    return Microbatch(tokens, positions, tokens, torch.ones(shape, device=context.device))


@contextlib.contextmanager
def _state_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put back what a forward or a backward changes beside gradients.

    These are the generators of dropout, buffers, the sums of auxiliary losses that megatron-core keeps for a log, and
    of TransformerEngine's modules the scales of fp8 and whether the next microbatch is the first with these weights.
    """
    every: list[Any] = [module for each in modules for module in each.modules()]
    generators = dropout_state()
    buffers = [(buffer, buffer.clone()) for module in every for buffer in module.buffers(recurse=False)]
    firsts = [(module, module.is_first_microbatch) for module in every if hasattr(module, "is_first_microbatch")]
    scales = [(module, module.get_fp8_meta_tensors()) for module in every if hasattr(module, "reset_fp8_meta_tensors")]
    yield
    restore_dropout_state(generators)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for module, first in firsts:
        module.is_first_microbatch = first
    for module, tensors in scales:
        module.reset_fp8_meta_tensors(tensors)
    clear_auxiliary_losses()
