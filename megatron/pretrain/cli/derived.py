"""Computes values that follow from several flags: sizes with a default in others, samples in steps, who plans.

These functions take flags that :mod:`megatron.pretrain.cli.rules` has accepted.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from hetero.plan.batch_sizes import BatchRampup, BatchSchedule, BatchSizes, VaryingBatch
from hetero.plan.ir import Precision
from hetero.runtime.options import AuxiliaryLoss
from hetero.spec.model import Activation, RotaryScaling
from megatron.pretrain.cli.fields import FlagValues
from megatron.pretrain.cli.value_types import TokenizerType


def has_samples(flags: FlagValues) -> bool:
    """Whether lengths are counted in samples instead of steps."""
    return flags["--train-samples"] is not None


def has_experts(flags: FlagValues) -> bool:
    """Whether the model is a mixture of experts."""
    return flags["--num-experts"] is not None


def is_rope(flags: FlagValues) -> bool:
    """Whether positions rotate queries and keys."""
    return flags["--use-rotary-position-embeddings"] is True or flags["--position-embedding-type"] == "rope"


def is_wsd(flags: FlagValues) -> bool:
    """Whether the learning rate warms up, stays, and decays at the end (warmup, stable, decay)."""
    return bool(flags["--lr-decay-style"] == "WSD")


def is_auto(flags: FlagValues) -> bool:
    """Whether the plan is asked for by ``auto`` in place of a file."""
    return bool(flags["--hetero-plan"] == Path("auto"))


def emulates(flags: FlagValues) -> bool:
    """Whether the cluster is emulated."""
    return flags["--hetero-emulate"] is not None


def has_plan_file(flags: FlagValues) -> bool:
    """Whether the plan is read from a file."""
    return flags["--hetero-plan"] is not None and not is_auto(flags)


def plan_file(flags: FlagValues) -> Path | None:
    """The plan file, if there is one."""
    path: Path | None = flags["--hetero-plan"]
    return path if has_plan_file(flags) else None


def cluster_file(flags: FlagValues) -> Path | None:
    """The cluster file, of real or of emulated devices."""
    path: Path | None = flags["--hetero-emulate"] if emulates(flags) else flags["--hetero-cluster"]
    return path


def planned_cluster(flags: FlagValues) -> Path:
    """The cluster file that rank 0 plans for."""
    path = cluster_file(flags)
    assert path is not None, "there is a plan file, or the flags give the uniform plan"
    return path


def plans_at_start(flags: FlagValues) -> bool:
    """Whether rank 0 plans for the cluster file before training starts."""
    return cluster_file(flags) is not None and not has_plan_file(flags)


def ffn_hidden_size(flags: FlagValues) -> int:
    """As given, else four times the hidden size; gated, Megatron-LM's two thirds of that, down to a multiple of 64."""
    given: int | None = flags["--ffn-hidden-size"]
    hidden: int = flags["--hidden-size"]
    if given is not None:
        return given
    return int((4 * hidden * 2 / 3) / 64) * 64 if flags["--swiglu"] else 4 * hidden


def moe_ffn_hidden_size(flags: FlagValues) -> int | None:
    """As given, else that of a plain MLP; ``None`` without experts."""
    if not has_experts(flags):
        return None
    given: int | None = flags["--moe-ffn-hidden-size"]
    return given or ffn_hidden_size(flags)


def moe_router_load_balancing(flags: FlagValues) -> AuxiliaryLoss:
    """As given or by default, but none where there are no experts."""
    style: AuxiliaryLoss = flags["--moe-router-load-balancing-type"]
    return style if has_experts(flags) else "none"


def tokenizer_type(flags: FlagValues) -> TokenizerType:
    """As given, else GPT-2's, which is Megatron-LM's default."""
    given: TokenizerType | None = flags["--tokenizer-type"]
    return given or "GPT2BPETokenizer"


def is_vocabulary_unpadded(flags: FlagValues) -> bool:
    """Whether the embedding has as many rows as the vocabulary has tokens."""
    return bool(flags["--no-pad-vocab-size"] or flags["--disable-pad-vocab-size"])


def make_vocab_size_divisible_by(flags: FlagValues) -> int:
    """What the rows of the embedding are a multiple of; 1 leaves the vocabulary without padding."""
    divisor: int = flags["--make-vocab-size-divisible-by"]
    return 1 if is_vocabulary_unpadded(flags) else divisor


def num_query_groups(flags: FlagValues) -> int:
    """Heads of keys and values: as many as of queries unless these share them."""
    name = "--num-query-groups" if flags["--group-query-attention"] else "--num-attention-heads"
    groups: int = flags[name]
    return groups


def kv_channels(flags: FlagValues) -> int:
    """Size of a head: as given, else the heads share the hidden size."""
    given: int | None = flags["--kv-channels"]
    hidden: int = flags["--hidden-size"]
    heads: int = flags["--num-attention-heads"]
    return hidden // heads if given is None else given


def position_embedding(flags: FlagValues) -> Literal["learned_absolute", "rope"]:
    """What tells the model where a token stands, by the new flag or the old one."""
    return "rope" if is_rope(flags) else "learned_absolute"


def rotary_scaling(flags: FlagValues) -> RotaryScaling | None:
    """What stretches rotary positions for long sequences, if anything."""
    if flags["--rotary-seq-len-interpolation-factor"] not in (None, 1):
        return RotaryScaling(kind="linear", factor=flags["--rotary-seq-len-interpolation-factor"])
    if not flags["--use-rope-scaling"]:
        return None
    return RotaryScaling(
        kind="llama3",
        factor=flags["--rope-scaling-factor"],
        low_freq_factor=flags["--hetero-rope-low-freq-factor"],
        high_freq_factor=flags["--hetero-rope-high-freq-factor"],
        original_max_position_embeddings=flags["--hetero-rope-original-max-positions"],
    )


def activation(flags: FlagValues) -> Activation:
    """The activation of the MLP."""
    if flags["--swiglu"]:
        return "swiglu"
    return "relu" if flags["--hetero-relu"] else "gelu"


def qkv_bias(flags: FlagValues) -> bool:
    """Whether queries, keys and values have a bias: like other linear layers, or by a flag of their own."""
    return not flags["--disable-bias-linear"] or bool(flags["--add-qkv-bias"])


def train_iters(flags: FlagValues) -> int:
    """Steps of the run. As in Megatron-LM, samples that do not fill a last step are left out; under a batch schedule, a
    last step takes more samples than the run has left."""
    steps: int | None = flags["--train-iters"]
    if steps is not None:
        return steps
    samples: int = flags["--train-samples"]
    sizes = batch_sizes(flags)
    return (
        sizes.num_steps(samples - 1) + 1 if isinstance(sizes.varying_batch, BatchSchedule) else sizes.num_steps(samples)
    )


def batch_schedule(flags: FlagValues) -> BatchSchedule | None:
    """Sizes of the global batch by the tokens that a run has consumed, if they are given so."""
    schedule: BatchSchedule | None = flags["--step-batch-size-schedule"]
    return None if schedule is None else dataclasses.replace(schedule, seq_length=flags["--seq-length"])


def global_batch_size(flags: FlagValues) -> int:
    """The batch that a plan is made for: as given, else the largest one of the batch schedule."""
    schedule = batch_schedule(flags)
    size: int = flags["--global-batch-size"] if schedule is None else schedule.largest
    return size


def eval_global_batch_size(flags: FlagValues) -> int | None:
    """The batch of evaluations; ``None`` where it is that of the plan."""
    size: int | None = flags["--eval-global-batch-size"]
    return None if size == global_batch_size(flags) else size


def varying_batch(flags: FlagValues) -> VaryingBatch | None:
    """By what the global batch changes, if it does."""
    values: tuple[int, ...] | None = flags["--rampup-batch-size"]
    if values is None:
        return batch_schedule(flags)
    start, increment, samples = values
    return BatchRampup(start=start, increment=increment, samples=samples)


def batch_sizes(flags: FlagValues) -> BatchSizes:
    """How many samples each step takes."""
    return BatchSizes(global_batch_size(flags), varying_batch(flags))


def train_samples(flags: FlagValues) -> int:
    """Length of the run for the schedules: samples as given, also those of a step that they do not fill."""
    return _samples(flags, "--train-iters", "--train-samples") or 0


def lr_decay_samples(flags: FlagValues) -> int | None:
    """Samples after which the decay ends; ``None`` is the end of the run."""
    return _samples(flags, "--lr-decay-iters", "--lr-decay-samples")


def lr_warmup_samples(flags: FlagValues) -> int:
    """Samples of the warmup, 0 where it is given as a fraction."""
    return _samples(flags, "--lr-warmup-iters", "--lr-warmup-samples") or 0


def lr_wsd_decay_samples(flags: FlagValues) -> int | None:
    """Samples of WSD's last phase."""
    return _samples(flags, "--lr-wsd-decay-iters", "--lr-wsd-decay-samples")


def _samples(flags: FlagValues, iters: str, samples: str) -> int | None:
    """The value of that of two flags which counts what the run counts, in samples."""
    if has_samples(flags):
        counted: int | None = flags[samples]
        return counted
    steps: int | None = flags[iters]
    return None if steps is None else steps * global_batch_size(flags)


def weight_decay(flags: FlagValues) -> float:
    """Return the constant weight decay: as given, or as both ends state it."""
    start, end = flags["--start-weight-decay"], flags["--end-weight-decay"]
    is_stated_by_ends = flags["--weight-decay-incr-style"] == "constant" and start is not None and start == end
    decay: float = start if is_stated_by_ends else flags["--weight-decay"]
    return decay


def start_weight_decay(flags: FlagValues) -> float:
    """Weight decay of the first step."""
    return _weight_decay(flags, "--start-weight-decay")


def end_weight_decay(flags: FlagValues) -> float:
    """Weight decay of the last step."""
    return _weight_decay(flags, "--end-weight-decay")


def _weight_decay(flags: FlagValues, name: str) -> float:
    decay: float = weight_decay(flags) if flags["--weight-decay-incr-style"] == "constant" else flags[name]
    return decay


def stages_per_rank(flags: FlagValues) -> int:
    """Stages that the ranks of a pipeline position hold, given as their number or by the layers of each."""
    given: int | None = flags["--num-layers-per-virtual-pipeline-stage"]
    if given is None:
        stages: int = flags["--num-virtual-stages-per-pipeline-rank"]
        return stages
    num_layers: int = flags["--num-layers"]
    pipeline: int = flags["--pipeline-model-parallel-size"]
    return num_layers // (given * pipeline)


def recompute_num_layers(flags: FlagValues) -> int | None:
    """Return how many layers of each stage are recomputed; ``None`` is all, as with the method uniform."""
    given: int | None = flags["--recompute-num-layers"]
    return None if flags["--recompute-method"] == "uniform" else given


def precision(flags: FlagValues) -> Precision | None:
    """The half precision that is asked for, if any."""
    return "bf16" if flags["--bf16"] else "fp16" if flags["--fp16"] else None


def backend(flags: FlagValues) -> Literal["gloo", "nccl"]:
    """Who moves tensors: as given, else gloo for an emulated cluster, else what the machine has."""
    given: Literal["gloo", "nccl"] | None = flags["--distributed-backend"]
    return given or ("gloo" if emulates(flags) else default_backend())


def default_backend() -> Literal["gloo", "nccl"]:
    """``nccl`` where CUDA is there, else ``gloo``."""
    # Flags are also read where torch takes seconds to load and is not needed: --help, errors, a stated backend.
    import torch  # noqa: PLC0415

    return "nccl" if torch.cuda.is_available() else "gloo"
