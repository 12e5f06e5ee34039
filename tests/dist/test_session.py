"""What a step of a training session does beside the step: the schedule moves, weights are whole, NaN ends it."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.distributed.process_groups import create_groups
from hetero.distributed.timing import Start, Timing, TransferDirection, Waitable
from hetero.plan.ir import Plan, Precision
from hetero.plan.reshard import Transfer
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.runtime.session import NotFiniteError, TrainingSession
from hetero.runtime.trainer import Trainer
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, data_of, spoil_gradient

pytestmark = [pytest.mark.dist]

CPU = torch.device("cpu")
MODEL = gpt2_model(num_layers=2)
LAST, IDLE = 2, 3


def two_stages(precision: Precision = "fp32") -> Plan:
    """tp 2 before one rank, and an idle one."""
    stages = stage(layers=(0, 1), ranks=(0, 1), tp=2), stage(layers=(1, 2), ranks=(LAST,))
    return plan(MODEL, [replica(*stages)], idle_ranks=(IDLE,), precision=precision)


class CountedSamples:
    """A schedule that counts what it is told, as Megatron-LM's do: samples."""

    def __init__(self) -> None:
        self.num_samples = 0

    def step(self, increment: int) -> None:
        self.num_samples += increment


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a rank saw of a few steps, the second of which was spoilt."""

    skipped: list[bool]
    num_samples: int
    error: str


def spoil_the_second_step(rank: int, plan: Plan, what: str, check: bool, scale: LossScaleOptions | None) -> Ended:
    """The last stage's loss is no number, or rank 1's gradient is infinite."""
    context = create_groups(plan, device=CPU)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS, loss_scale=scale)
    schedule, skipped = CountedSamples(), []
    session = TrainingSession(context, trainer, data=data_of(context), schedule=schedule, check_for_nan=check)
    try:
        for step in range(3):
            hook = None
            if step == 1 and rank == (LAST if what == "loss" else 1):
                name = "decoder.final_layernorm.bias" if what == "loss" else "embedding.word_embeddings.weight"
                if what == "loss":
                    trainer.parameters[name][1].data.fill_(torch.nan)
                else:
                    hook = spoil_gradient(trainer, name, torch.inf)
            skipped.append(session.step().skipped)
            if hook is not None:
                hook.remove()
    except NotFiniteError as error:
        return Ended(skipped, schedule.num_samples, str(error))
    return Ended(skipped, schedule.num_samples, "")


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("loss", f"the loss on rank {LAST} and the gradient on ranks 0-{LAST} are not finite"),
        # Word embeddings are tied: the last stage has the sum, too.
        ("gradient", f"the gradient on ranks 1-{LAST} is not finite"),
    ],
)
def test_what_is_no_number_ends_training_on_all_ranks(what: str, named: str) -> None:
    """With one message that names step, ranks and what to do; also on the idle rank, and before the schedule moves."""
    made = two_stages()
    ended = run_ranks(spoil_the_second_step, made.world_size, made, what, True, None)
    assert [each.skipped for each in ended] == [[False]] * made.world_size
    assert [each.num_samples for each in ended] == [made.global_batch_size] * made.world_size
    (said,) = {each.error for each in ended}
    assert said.startswith(f"step 2: {named}, and training stopped before it could be saved; ")
    assert said.endswith("or skip such steps with --no-check-for-nan-in-loss-and-grad")


@pytest.mark.parametrize(
    ("precision", "check", "scale"),
    [("fp32", False, None), ("fp16", True, LossScaleOptions(initial=2.0))],
    ids=["not checked", "a scale that adapts"],
)
def test_a_step_that_is_skipped_moves_no_schedule(
    precision: Precision, check: bool, scale: LossScaleOptions | None
) -> None:
    made = two_stages(precision)
    ended = run_ranks(spoil_the_second_step, made.world_size, made, "gradient", check, scale)
    assert ended == [Ended([False, True, False], 2 * made.global_batch_size, "")] * made.world_size


def test_a_constant_scale_does_not_adapt() -> None:
    made = two_stages("fp16")
    ended = run_ranks(spoil_the_second_step, made.world_size, made, "gradient", True, LossScaleOptions(constant=2.0))
    assert all(each.error.startswith("step 2: the gradient on ranks 1-2 is") for each in ended)


def weights_after_two_steps(rank: int, plan: Plan, overlap: bool) -> dict[str, np.ndarray]:
    context = create_groups(plan, device=CPU)
    options = dataclasses.replace(SMALL_BUCKETS, overlap_param_gather=overlap)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=options)
    session = TrainingSession(context, trainer, data=data_of(context))
    for _ in range(2):
        session.step()
    return {name: tensor.numpy().copy() for name, tensor in session.weights().items()}


@pytest.mark.slow
def test_weights_are_whole_while_a_gather_is_on_its_way() -> None:
    """Those that other holders cut otherwise come into their tensors only when somebody waits for them."""
    cut = replica(stage(layers=(0, 2), ranks=(0, 1), tp=2), num_samples=4)
    whole = replica(stage(layers=(0, 2), ranks=(2,)), num_samples=4)
    made = sharded(plan(llama_model(num_layers=2), [cut, whole], precision="fp64"))
    overlapped = run_ranks(weights_after_two_steps, made.world_size, made, True)
    awaited = run_ranks(weights_after_two_steps, made.world_size, made, False)
    for ours, expected in zip(overlapped, awaited, strict=True):
        for name, weight in expected.items():
            np.testing.assert_array_equal(ours[name], weight, name)


class Work:
    """A transfer that is done as soon as anybody asks, and notes whether it is waited for."""

    def __init__(self, inner: Waitable) -> None:
        self._inner = inner
        self.was_awaited = False

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.was_awaited = True
        self._inner.wait()


class NotedTransfers(Timing):
    def __init__(self) -> None:
        self.works: list[Work] = []

    def transfer(
        self, direction: TransferDirection, messages: Sequence[Transfer], number: int, start: Start
    ) -> Sequence[Waitable]:
        works = [Work(work) for work in start()]
        self.works += works
        return works


def transfers_of_a_step(rank: int, plan: Plan) -> list[bool]:
    timing = NotedTransfers()
    context = create_groups(plan, device=CPU, timing=timing)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS)
    TrainingSession(context, trainer, data=data_of(context)).step()
    return [work.was_awaited for work in timing.works]


def test_every_transfer_is_waited_for() -> None:
    """Also a send that has long been done: on NCCL its buffer stays until then."""
    stages = [stage(layers=(s, s + 1), ranks=(s,)) for s in range(2)]
    made = plan(MODEL, [replica(*stages, num_samples=8)])
    for awaited in run_ranks(transfers_of_a_step, made.world_size, made):
        assert awaited == [True] * 16


class Copies(TorchDispatchMode):
    """The sizes of all tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.numels.append(result.numel())
        return result


def copies_of_a_step(rank: int, plan: Plan) -> list[int]:
    context = create_groups(plan, device=CPU)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS)
    session = TrainingSession(context, trainer, data=data_of(context))
    with Copies() as copies:
        session.compute_gradients()
    return copies.numels


def test_masking_the_padding_copies_no_gradient_of_the_vocabulary() -> None:
    """The vocabulary is large, and so is the gradient of its logits."""
    vocabulary = 1024
    model = gpt2_model(num_layers=1, vocab_size=vocabulary - 3, padded_vocab_size=vocabulary)
    made = plan(model, [replica(stage(layers=(0, 1), ranks=(0,)), num_samples=1)])
    (numels,) = run_ranks(copies_of_a_step, 1, made)
    assert numels, "nothing was seen"
    assert made.seq_length * vocabulary not in numels
