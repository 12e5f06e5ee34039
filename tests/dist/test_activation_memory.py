"""What a forward keeps for its backward is what the memory model counts, and has no attention scores."""

import pytest
import torch

from hetero.cost.layers.activation_memory import megatron_core_saved_bytes
from hetero.cost.runtime_model import HETERO
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Recompute
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import build_stages
from hetero.spec.profile import ModuleKind
from tests.helpers.cases import slow
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_profiles import cost_model
from tests.helpers.training import microbatches

pytestmark = pytest.mark.dist

MICRO_BATCH_SIZE = 2


def saved_bytes(rank: int, plan: Plan, options: StageOptions | None = None) -> int:
    """Bytes of the tensors that the forward of a microbatch saves, weights not counted, each storage once."""
    context = create_groups(plan, device=torch.device("cpu"))
    (model,) = build_stages(context, options=options or StageOptions(), seed=7)
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward(None, microbatches(plan, rank, step=0)[0])
    return sum(storage.nbytes() for storage in kept.values())


def plan_of_sequences(seq_length: int, recompute: Recompute) -> Plan:
    model = gpt2_model(max_position_embeddings=512)
    one = stage(layers=(0, 6), ranks=(0,), mbs=MICRO_BATCH_SIZE, recompute=recompute)
    return plan_of(model, [replica(one, num_samples=4)], seq_length=seq_length)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("seq_length", [64, *slow(512)])
def test_a_forward_keeps_what_the_memory_model_counts(seq_length: int, recompute: Recompute) -> None:
    made = plan_of_sequences(seq_length, recompute)
    costs = cost_model(made.model, [], seq_length=seq_length)
    microbatch = costs.microbatch(tp=1, micro_batch_size=MICRO_BATCH_SIZE)

    def counted(kind: str, recompute: Recompute) -> int:
        return costs.saved_bytes(kind, microbatch, device="cpu", recompute=recompute)

    predicted = 6 * counted("block", recompute) + counted("head", "none") + counted("embedding", "none")
    (measured,) = run_ranks(saved_bytes, 1, made)
    assert measured == pytest.approx(predicted, rel=0.03)
    # With scores, a block of the longer sequence would keep six times as much.
    with_scores = megatron_core_saved_bytes("block", costs.shape, microbatch, recompute="none", flash_attention=False)
    assert with_scores > (1.6 if seq_length == 64 else 5) * counted("block", "none")


def test_dropout_keeps_one_mask_behind_each_half_and_the_embedding() -> None:
    """No copy beside it. Where CUDA's dropout keeps a bool, the CPU's keeps what it multiplies by, as wide as what it
    drops."""
    made = plan_of_sequences(64, "none")
    counts = []
    for runtime in (HETERO, HETERO.with_dropout_of(made)):
        costs = cost_model(made.model, [], seq_length=64, runtime=runtime)
        microbatch = costs.microbatch(tp=1, micro_batch_size=MICRO_BATCH_SIZE)
        block, embedding = (costs.saved_bytes(kind, microbatch, device="cpu") for kind in ("block", "embedding"))
        counts.append(6 * block + embedding)
    masks = counts[1] - counts[0]
    assert masks == 13 * MICRO_BATCH_SIZE * 64 * made.model.hidden_size
    (dropped,) = run_ranks(saved_bytes, 1, made, StageOptions(hidden_dropout=0.1))
    (whole,) = run_ranks(saved_bytes, 1, made)
    assert dropped - whole == 4 * masks


def test_the_loss_keeps_one_softmax() -> None:
    """In the place of the logits, and nothing else of their size."""
    model = gpt2_model(num_layers=1, padded_vocab_size=4096)
    one = stage(layers=(0, 1), ranks=(0,), mbs=MICRO_BATCH_SIZE)
    made = plan_of(model, [replica(one, num_samples=4)], seq_length=64)
    costs = cost_model(model, [], seq_length=64)
    microbatch = costs.microbatch(tp=1, micro_batch_size=MICRO_BATCH_SIZE)
    kinds: tuple[ModuleKind, ...] = ("embedding", "block", "head")
    predicted = sum(costs.saved_bytes(kind, microbatch, device="cpu") for kind in kinds)
    assert predicted < 1.2 * 4 * 4096 * MICRO_BATCH_SIZE * 64
    (measured,) = run_ranks(saved_bytes, 1, made)
    assert measured == pytest.approx(predicted, rel=0.01)


def test_what_is_kept_grows_with_the_sequence_and_not_with_its_square() -> None:
    short, long = (run_ranks(saved_bytes, 1, plan_of_sequences(length, "none"))[0] for length in (64, 512))
    assert long == pytest.approx(8 * short, rel=0.01)
