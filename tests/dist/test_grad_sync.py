"""Sums of gradients over all holders: the right numbers, launched in one order on all ranks, whatever arrives when.

No model here: parameters are bare tensors, and a backward gives each the gradient that the test wants.
"""

import dataclasses
import gc
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from hetero.distributed.process_groups import StageContext, create_groups
from hetero.errors import ScheduleError
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Plan, Stage
from hetero.plan.lowering import CollectiveOptions, lower_rank
from hetero.runtime.buckets import local_buckets
from hetero.runtime.grad_sync import GradientSync
from hetero.runtime.main_grad import main_grad
from hetero.schedule.actions import UPDATE, Action, ActionKind
from hetero.spec.parameters import EMBEDDING, Parameter, parameters, shard_intervals, stage_parameters
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import one_process, train

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

CPU = torch.device("cpu")
BUCKET_NUMEL = 3000
HEAD = "output_layer.weight"


def unlike_replicas(model: Any) -> Plan:
    """Other cuts, other tp with and without sequence parallelism, dp 2, and an idle rank."""
    first = replica(
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True, mbs=2),
        stage(layers=(2, 3), ranks=(2, 3), dp=2),
        num_samples=4,
    )
    second = replica(stage(layers=(0, 3), ranks=(4, 6, 7, 8), tp=4), num_samples=2)
    return plan(model, [first, second], idle_ranks=(5,))


MODELS = {"gpt2-tied": gpt2_model(num_layers=3), "llama-gqa": llama_model(num_layers=3)}

Tensors = Mapping[str, tuple[Parameter, torch.nn.Parameter]]


def bare_parameters(plan: Plan, work: StageContext) -> dict[str, tuple[Parameter, torch.nn.Parameter]]:
    held = stage_parameters(plan.model, first_layer=work.stage.first_layer, end_layer=work.stage.end_layer)
    tp = work.stage.tp
    return {p.name: (p, torch.nn.Parameter(torch.zeros(p.local_shape(tp), dtype=torch.float64))) for p in held}


def start(rank: int, plan: Plan, *, overlap: bool = True) -> tuple[Action, GradientSync, Tensors]:
    """The last backward of a rank's program, its gradient sums, and its tensors."""
    context = create_groups(plan, device=CPU)
    assert context.work is not None
    tensors = bare_parameters(plan, context.work)
    buckets = local_buckets(context, tensors, bucket_numel=BUCKET_NUMEL, gradient_dtype=torch.float64)
    program = lower_rank(
        plan,
        rank,
        {local.number: local.bucket for local in buckets},
        options=CollectiveOptions(overlap_grad_reduce=overlap),
    )
    sync = GradientSync(buckets, program)
    sync.zero()
    backwards = [step.action for step in program.queues["compute"] if step.action.kind == ActionKind.B]
    return backwards[-1], sync, tensors


def finish(sync: GradientSync, last: Action) -> None:
    sync.ends(last)
    sync.finish()


def backward(tensor: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Let autograd add ``gradient`` to the gradient of ``tensor``."""
    (tensor * gradient).sum().backward()


def full_gradient(parameter: Parameter, *, holder: tuple[int, ...], seed: int) -> np.ndarray:
    """What one holder of all of a parameter, a data-parallel rank of a stage, adds to its gradient."""
    numbers = np.random.default_rng([seed, *holder, *parameter.name.encode()])
    return numbers.standard_normal(parameter.shape)


def cut(full: np.ndarray, parameter: Parameter, *, tp: int, tp_rank: int) -> np.ndarray:
    if parameter.shard_dim is None:
        return full
    intervals = shard_intervals(parameter, tp=tp, tp_rank=tp_rank)
    indices = np.concatenate([np.arange(i.global_start, i.global_start + i.length) for i in intervals])
    return np.take(full, indices, axis=parameter.shard_dim)


def local_gradient(parameter: Parameter, plan: Plan, rank: int, *, seed: int) -> np.ndarray:
    """What ``rank`` computes of its holder's gradient: its shard; of a replicated parameter all of it, or, where
    each tensor-parallel rank sees other rows or heads, a part."""
    place = plan.placement(rank)
    assert place is not None
    held_by = plan.replicas[place.replica].stages[place.stage]
    full = full_gradient(parameter, holder=(place.replica, place.stage, place.dp_rank), seed=seed)
    if parameter.shard_dim is None and held_by.tp > 1 and is_partial(parameter, held_by):
        parts = np.arange(1, held_by.tp + 1) / sum(range(1, held_by.tp + 1))
        full = full * parts[place.tp_rank]
    return cut(full, parameter, tp=held_by.tp, tp_rank=place.tp_rank)


def is_partial(parameter: Parameter, held_by: Stage) -> bool:
    return parameter.partial_gradient == "always" or (
        parameter.partial_gradient == "sequence_parallel" and held_by.sequence_parallel
    )


def expected_gradient(parameter: Parameter, plan: Plan, *, seed: int) -> np.ndarray:
    """The sum over all holders, of which a tied embedding has two per replica."""
    holders = [
        (r, s, d)
        for r, s, held_by in plan.stages()
        for d in range(held_by.dp)
        if parameter in stage_parameters(plan.model, first_layer=held_by.first_layer, end_layer=held_by.end_layer)
    ]
    return sum((full_gradient(parameter, holder=h, seed=seed) for h in holders), np.zeros(parameter.shape))


def two_steps(rank: int, plan: Plan, overlap: bool) -> dict[str, np.ndarray] | None:
    """The gradients after a second step, of three microbatches; what the first step left must not be in them."""
    if plan.placement(rank) is None:
        create_groups(plan, device=CPU)
        return None
    last, sync, tensors = start(rank, plan, overlap=overlap)
    for seeds in ((1, 2), (3, 4, 5)):
        sync.zero()
        for seed in seeds:
            if seed == seeds[-1]:
                sync.begins(last)
            for parameter, tensor in reversed(tensors.values()):
                backward(tensor, torch.tensor(local_gradient(parameter, plan, rank, seed=seed)))
        finish(sync, last)
    return {name: main_grad(tensor).numpy().copy() for name, (_, tensor) in tensors.items()}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "after"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_holder_ends_with_the_sum_over_all(model: Any, overlap: bool) -> None:
    made = unlike_replicas(model)
    by_name = {parameter.name: parameter for parameter in parameters(model)}
    total = {
        name: sum(expected_gradient(parameter, made, seed=seed) for seed in (3, 4, 5))
        for name, parameter in by_name.items()
    }
    for rank, gradients in enumerate(run_ranks(two_steps, made.world_size, made, overlap)):
        place = made.placement(rank)
        if place is None:
            continue
        assert gradients.keys() <= by_name.keys()
        tp = made.replicas[place.replica].stages[place.stage].tp
        for name, gradient in gradients.items():
            expected = cut(total[name], by_name[name], tp=tp, tp_rank=place.tp_rank)
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12, err_msg=f"rank {rank}: {name}")


Launches = list[tuple[int, ...]]


def recorded(launches: Launches) -> None:
    """From now on, note the ranks of every all-reduce of this process."""
    all_reduce = dist.all_reduce

    def recording(tensor: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
        launches.append(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, group=group, async_op=async_op)

    dist.all_reduce = recording


def launches_of_a_step(rank: int, plan: Plan, order: Callable[[int, Iterable[Any]], list[Any]]) -> tuple[Launches, int]:
    """What a rank launches when its gradients come in ``order``, and how much of that before the backward's end."""
    launches: Launches = []
    if plan.placement(rank) is None:
        create_groups(plan, device=CPU)
        return launches, 0
    last, sync, tensors = start(rank, plan)
    recorded(launches)
    sync.begins(last)
    for _, tensor in order(rank, tensors.values()):
        backward(tensor, torch.ones_like(tensor))
    before = len(launches)
    finish(sync, last)
    return launches, before


def as_the_backward(rank: int, tensors: Iterable[Any]) -> list[Any]:
    return list(reversed(list(tensors)))


def as_the_forward(rank: int, tensors: Iterable[Any]) -> list[Any]:
    return list(tensors)


def shuffled(rank: int, tensors: Iterable[Any]) -> list[Any]:
    return random.Random(rank).sample(list(tensors), k=len(list(tensors)))


@pytest.mark.rotates("layouts")
@pytest.mark.parametrize("order", [as_the_backward, as_the_forward, shuffled])
def test_all_ranks_launch_what_they_share_in_one_order(order: Callable[..., list[Any]]) -> None:
    """NCCL deadlocks if two ranks launch the same two collectives the other way round."""
    made = unlike_replicas(MODELS["gpt2-tied"])
    everywhere = [bucket.ranks for bucket in gradient_buckets(made, bucket_numel=BUCKET_NUMEL)]
    assert len(everywhere) > 10
    for rank, (launches, before_finish) in enumerate(run_ranks(launches_of_a_step, made.world_size, made, order)):
        assert launches == [ranks for ranks in everywhere if rank in ranks and len(ranks) > 1]
        assert before_finish == len(launches), "the last gradient completes the last bucket"


def launches_by_gradient(rank: int, plan: Plan, overlap: bool) -> list[int]:
    """How many reductions have been launched after each gradient of a backward."""
    launches: Launches = []
    last, sync, tensors = start(rank, plan, overlap=overlap)
    recorded(launches)
    sync.begins(last)
    counts = []
    for _, tensor in as_the_backward(rank, tensors.values()):
        backward(tensor, torch.ones_like(tensor))
        counts.append(len(launches))
    finish(sync, last)
    return [*counts, len(launches)]


def test_buckets_start_beside_the_backward() -> None:
    """With overlap the head's bucket leaves first and the embedding's last; without, all wait for the end."""
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2))])
    for counts in run_ranks(launches_by_gradient, 2, made, True):
        assert counts[0] == 0
        assert 0 < counts[len(counts) // 2] < counts[-1]
        assert counts[-2] == counts[-1]
    for counts in run_ranks(launches_by_gradient, 2, made, False):
        assert set(counts[:-1]) == {0} != {counts[-1]}


def without_one_gradient(rank: int, plan: Plan, name: str) -> dict[str, float]:
    """Two microbatches; in the last, rank 1 computes no gradient for ``name``, as of an expert without tokens."""
    last, sync, tensors = start(rank, plan)
    for _, tensor in tensors.values():
        backward(tensor, torch.full_like(tensor, 1.0 + rank))
    sync.begins(last)
    for each, (_, tensor) in reversed(tensors.items()):
        if rank == 1 and each == name:
            continue
        backward(tensor, torch.full_like(tensor, 10.0 * (1 + rank)))
    finish(sync, last)
    return {each: main_grad(tensor).mean().item() for each, (_, tensor) in tensors.items()}


@pytest.mark.parametrize("name", [HEAD, "decoder.layers.1.mlp.linear_fc1.weight", EMBEDDING])
def test_a_gradient_that_never_comes_holds_nobody_up(name: str) -> None:
    """Its bucket and those behind it are reduced at the end; the others count what did come."""
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0, 1, 2), dp=3))])
    all_came = (1 + 10) + (2 + 20) + (3 + 30)
    for gradients in run_ranks(without_one_gradient, 3, made, name):
        expected = {each: all_came - 20 if each == name else all_came for each in gradients}
        assert gradients == pytest.approx(expected)


def finishes_without(rank: int, plan: Plan, absent: str) -> str:
    """One microbatch, in which nothing comes for ``absent``; what the sums say to that."""
    last, sync, tensors = start(rank, plan)
    sync.begins(last)
    for name, (_, tensor) in reversed(tensors.items()):
        if name != absent:
            backward(tensor, torch.ones_like(tensor))
    try:
        finish(sync, last)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model", [MODELS["llama-gqa"], moe_model(num_layers=3)], ids=["llama-gqa", "moe"])
def test_a_parameter_without_any_gradient_is_an_error_and_no_wait(model: Any) -> None:
    """On every rank that holds it; only experts, which may have no tokens, need none."""
    made = plan(model, [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2)), replica(stage(layers=(0, 3), ranks=(2,)))])
    assert run_ranks(finishes_without, 3, made, "nothing") == [""] * 3
    for name in ("decoder.layers.1.self_attention.linear_qkv.weight", HEAD):
        for said in run_ranks(finishes_without, 3, made, name):
            assert said.startswith(f"gradients: none has come for {name} in this step; ")
    if model.num_experts is not None:
        expert = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
        assert run_ranks(finishes_without, 3, made, expert) == [""] * 3


def alone_in_a_bucket(rank: int, plan: Plan) -> tuple[str, str]:
    """The same where no other rank holds what is missing."""
    return finishes_without(rank, plan, "nothing"), finishes_without(rank, plan, HEAD)


def test_it_is_an_error_where_nothing_is_summed_too() -> None:
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0,)))])
    ((nothing, said),) = run_ranks(alone_in_a_bucket, 1, made)
    assert nothing == ""
    assert said.startswith(f"gradients: none has come for {HEAD} in this step; ")


def gradients_of_a_later_kernel(rank: int, plan: Plan) -> tuple[list[int], dict[str, float]]:
    """As TransformerEngine does it: the backward brings a tensor of any content, and the kernel runs after it."""
    context = create_groups(plan, device=CPU)
    assert context.work is not None
    tensors = bare_parameters(plan, context.work)
    late = [tensor for name, (_, tensor) in tensors.items() if "linear_" in name]
    for tensor in late:
        tensor.skip_backward_post_hook = True
    buckets = local_buckets(context, tensors, bucket_numel=BUCKET_NUMEL, gradient_dtype=torch.float64)
    held = {local.number: local.bucket for local in buckets}
    program = lower_rank(plan, rank, held, options=CollectiveOptions())
    sync = GradientSync(buckets, program)
    launches: Launches = []
    recorded(launches)
    sync.zero()
    counts = []
    for action in (step.action for step in program.queues["compute"] if step.action != UPDATE):
        sync.begins(action)
        if action.kind == ActionKind.I:
            for _, tensor in reversed(tensors.values()):
                is_late = any(tensor is each for each in late)
                backward(tensor, torch.full_like(tensor, torch.nan if is_late else 1.0))
                tensor.grad_added_to_main_grad = is_late
        elif action.kind == ActionKind.W:
            for tensor in late:
                main_grad(tensor).add_(1.0)
                sync.arrived(tensor)
        counts.append(len(launches))
        sync.ends(action)
    sync.finish()
    return counts, {name: main_grad(tensor).mean().item() for name, (_, tensor) in tensors.items()}


def test_a_kernel_that_adds_after_the_backward_is_waited_for() -> None:
    """What autograd brings for its weights is dropped, and their sums start with the last of them."""
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2, delay=1), num_samples=6)])
    for counts, gradients in run_ranks(gradients_of_a_later_kernel, 2, made):
        assert set(gradients.values()) == {2.0 * 3}
        assert counts[-2] == 0 < counts[-1], "in the last W"


def trainings_that_live_on(rank: int, plan: Plan) -> int:
    """How many of three trainings, of which nobody holds any more than their parameters, are still there."""
    alive, parameters = [], []
    for _ in range(3):
        _, sync, tensors = start(rank, plan)
        alive.append(weakref.ref(sync))
        parameters.append(tensors)
        del sync, tensors
    gc.collect()
    return sum(each() is not None for each in alive)


def test_hooks_on_parameters_keep_no_training_alive() -> None:
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2))])
    assert run_ranks(trainings_that_live_on, 2, made) == [0, 0]


def live_while_moving(rank: int, plan: Plan) -> tuple[list[int], int]:
    """When torch is told to give memory back: which old weights are there still, and how many gradients already."""
    context = create_groups(plan, device=CPU)
    assert context.work is not None
    held = stage_parameters(plan.model, first_layer=0, end_layer=plan.model.num_layers)
    tensors = {p.name: (p, torch.nn.Parameter(torch.zeros(p.shape, dtype=torch.bfloat16))) for p in held}
    before = [StorageWeakRef(tensor.untyped_storage()) for _, tensor in tensors.values()]
    made: list[torch.dtype] = []
    seen: list[tuple[list[int], int]] = []
    zeros = torch.zeros

    def noting(*size: Any, **options: Any) -> torch.Tensor:
        made.append(options["dtype"])
        return zeros(*size, **options)

    def look() -> None:
        seen.append(([i for i, ref in enumerate(before) if not ref.expired()], made.count(torch.float32)))

    with mock.patch.object(torch, "zeros", noting), mock.patch.object(torch.cuda, "empty_cache", look):
        local_buckets(context, tensors, bucket_numel=BUCKET_NUMEL, gradient_dtype=torch.float32)
    assert made.count(torch.float32) == made.count(torch.bfloat16) > 1
    (found,) = seen
    return found


def test_gradients_are_made_when_the_old_weights_are_gone() -> None:
    """Else the start of a run would take more memory than its steps."""
    made = plan(MODELS["llama-gqa"], [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2))])
    for old_weights, gradients in run_ranks(live_while_moving, 2, made):
        assert old_weights == []
        assert gradients == 0


def test_experts_without_tokens() -> None:
    """The two tokens of a microbatch visit two experts each: at least four of eight experts get none."""
    model = moe_model(num_layers=2, num_experts=8)
    replicas = [
        replica(stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True), stage(layers=(1, 2), ranks=(2,)), num_samples=2),
        replica(stage(layers=(0, 2), ranks=(3, 4), dp=2), num_samples=2),
    ]
    made = dataclasses.replace(plan(model, replicas, seq_length=2), precision="fp64")
    expected = one_process(made, 2)
    for trace in run_ranks(train, made.world_size, made, 2):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-9)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=1e-9)
