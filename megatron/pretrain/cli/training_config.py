"""Declares the flags of a run: data, optimizer, loss scale, checkpoints, and when it evaluates and ends."""

from operator import itemgetter
from pathlib import Path
from typing import Literal

from megatron.pretrain.cli import derived
from megatron.pretrain.cli.fields import (
    Condition,
    Flag,
    Relations,
    computed,
    config_dataclass,
    equals,
    flag,
    given,
)
from megatron.pretrain.cli.value_types import (
    BELOW_1,
    COUNT,
    COUNT_FROM_0,
    LOSS_SCALE,
    NOT_NEGATIVE,
    PATH_AS_GIVEN,
    POSITIVE,
    PREFIXES,
    PROCESSES,
    SEED,
    SPLIT,
    TOKENIZER,
    TokenizerType,
    only,
    or_off,
)

REGULARIZATION, OPTIMIZER = "regularization", "optimizer"
"""Groups of ``--help`` beside that of the config."""

_HAS_FILES = Condition(
    lambda flags: not flags["--mock-data"],
    "--data-path or --train-data-path",
    note="--mock-data makes up its tokens, which are neither split nor kept",
)
_OF_TRAIN_FILES = Relations(needs=(given("--train-data-path"),))
_GROWS = Condition(
    lambda flags: flags["--weight-decay-incr-style"] != "constant", "--weight-decay-incr-style linear or cosine"
)
_IS_WSD = equals("--lr-decay-style", "WSD")
_OF_WSD = Relations(needs=(_IS_WSD,))
_OF_FP16 = Relations(needs=(given("--fp16"),))
_OF_EVALUATION = Relations(
    needs=(Condition(lambda flags: flags["--eval-iters"] > 0, "--eval-iters above 0", switch="--eval-iters"),)
)
_OF_SAVE = Relations(needs=(given("--save"),))
_OF_LOAD = Relations(needs=(given("--load"),))


def _of_growing_decay(name: str) -> Relations:
    """Relate an end of a weight decay that grows; one that stays constant may be stated there, or repeated."""
    return Relations(
        needs=(_GROWS,),
        idle=lambda flags: (
            not _GROWS.holds(flags)
            and (flags["--start-weight-decay"] == flags["--end-weight-decay"] or flags[name] == flags["--weight-decay"])
        ),
    )


@config_dataclass
class DataConfig:
    """Says where the tokens come from. ``data_path`` is prefixes, or weights and prefixes in turn, as Megatron has it.

    Exactly one of ``data_path``, ``train_data_path`` and ``mock_data`` is set.
    dataloader_type: of Megatron-LM's scripts, with one legal value.
    tokenizer_model: a ``tokenizer.json``, a SentencePiece model or the folder of one, where the tokenizer reads it.
    vocab_file, merge_file: both set exactly for ``GPT2BPETokenizer``.
    null_eod: id that ends a document of ``NullTokenizer``; ``None`` for its last one.
    """

    seq_length: int = flag("Tokens of one sample.", COUNT)
    data_path: tuple[str, ...] = flag(
        "Prefixes of indexed token files, or weights and prefixes in turn; --split divides them.",
        PREFIXES,
        default=(),
        relations=Relations(excludes=("--train-data-path", "--valid-data-path", "--test-data-path")),
    )
    train_data_path: tuple[str, ...] = flag(
        "The same for training alone, instead of --data-path.", PREFIXES, default=()
    )
    valid_data_path: tuple[str, ...] = flag(
        "Validation files, with --train-data-path.", PREFIXES, default=(), relations=_OF_TRAIN_FILES
    )
    test_data_path: tuple[str, ...] = flag(
        "Test files, with --train-data-path.", PREFIXES, default=(), relations=_OF_TRAIN_FILES
    )
    split: str = flag(
        "Shares of training, validation and test.",
        SPLIT,
        default="969, 30, 1",
        relations=Relations(
            needs=(
                _HAS_FILES,
                Condition(lambda flags: flags["--data-path"] or flags["--mock-data"], "--data-path"),
            )
        ),
    )
    data_cache_path: Path | None = flag(
        "Folder that keeps the sample indices between runs; no other user may write it (default: PREFIX_cache next to "
        "the first data set).",
        default=None,
        relations=Relations(needs=(_HAS_FILES,)),
    )
    mock_data: bool = flag(
        "Made-up tokens instead of files.",
        default=False,
        relations=Relations(excludes=("--data-path", "--train-data-path")),
    )
    tokenizer_type: TokenizerType = computed(
        derived.tokenizer_type,
        Flag(
            "--tokenizer-type",
            "Behind --tokenizer-model the tokenizer.json of a Hugging Face model, or a SentencePiece model, where "
            "Llama2Tokenizer begins documents with BOS; GPT-2's --vocab-file and --merge-file, which choose it on "
            "their own; bytes as tokens; or none, only --vocab-size many numbers.",
            TOKENIZER,
        ),
    )
    tokenizer_model: str | None = flag(
        "A tokenizer.json or a SentencePiece model, or the folder that has it.", PATH_AS_GIVEN, default=None
    )
    vocab_file: Path | None = flag("GPT-2's vocab.json.", default=None)
    merge_file: Path | None = flag("GPT-2's merges.txt.", default=None)
    null_eod: int | None = flag(
        "With --tokenizer-type NullTokenizer: id that ends a document; without it the last one of --vocab-size.",
        COUNT_FROM_0,
        name="--null-tokenizer-eod-id",
        default=None,
        relations=Relations(needs=(equals("--tokenizer-type", "NullTokenizer"),)),
    )
    eod_mask_loss: bool = flag("Leave the end of a document out of the loss.", default=False)
    dataloader_type: str = flag(
        "Accepted for Megatron-LM's scripts.",
        only("single", "samples come in one fixed order, whatever the plan"),
        default="single",
    )
    num_workers: int = flag("Processes per rank that load samples; 0 loads in the rank.", PROCESSES, default=2)
    seed: int = computed(itemgetter("--seed"))


@config_dataclass
class OptimizerConfig:
    """Sets AdamW and its schedules, which count samples, as Megatron-LM's do. ``clip_grad`` 0 switches clipping off.

    optimizer: of Megatron-LM's scripts, with one legal value.
    lr_decay_samples: ``None`` decays until the end of the run.
    lr_warmup_fraction: share of the samples until the decay ends, instead of ``lr_warmup_samples``.
    lr_wsd_decay_samples: set exactly when ``lr_decay_style`` is ``WSD``.
    start_weight_decay, end_weight_decay: both are ``weight_decay`` while ``weight_decay_incr_style`` is ``constant``.
    """

    weight_decay: float = computed(
        derived.weight_decay,
        Flag(
            "--weight-decay",
            "Decay of matrices, while its style is constant.",
            NOT_NEGATIVE,
            default=0.01,
            group=REGULARIZATION,
            relations=Relations(
                needs=(equals("--weight-decay-incr-style", "constant"),),
                idle=lambda flags: (
                    flags["--start-weight-decay"] == flags["--weight-decay"] == flags["--end-weight-decay"]
                ),
            ),
        ),
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "How weight decay grows from --start-weight-decay to --end-weight-decay over the run.",
        default="constant",
        group=REGULARIZATION,
    )
    start_weight_decay: float = computed(
        derived.start_weight_decay,
        Flag(
            "--start-weight-decay",
            "Weight decay of the first step.",
            NOT_NEGATIVE,
            group=REGULARIZATION,
            relations=_of_growing_decay("--start-weight-decay"),
        ),
    )
    end_weight_decay: float = computed(
        derived.end_weight_decay,
        Flag(
            "--end-weight-decay",
            "Weight decay of the last step.",
            NOT_NEGATIVE,
            group=REGULARIZATION,
            relations=_of_growing_decay("--end-weight-decay"),
        ),
    )
    clip_grad: float = flag(
        "Scale gradients down to this global norm; 0 never does.", NOT_NEGATIVE, default=1.0, group=REGULARIZATION
    )
    optimizer: str = flag(
        "Accepted for Megatron-LM's scripts.", only("adam", "AdamW does every update"), default="adam", group=OPTIMIZER
    )
    adam_beta1: float = flag("Decay of the gradient's running mean.", BELOW_1, default=0.9, group=OPTIMIZER)
    adam_beta2: float = flag("Decay of the squared gradient's running mean.", BELOW_1, default=0.999, group=OPTIMIZER)
    adam_eps: float = flag("Added to the denominator of an update.", POSITIVE, default=1e-8, group=OPTIMIZER)
    lr: float = flag("Highest learning rate, reached when warmup ends.", POSITIVE)
    min_lr: float = flag("Learning rate at the end of the decay, and after it.", NOT_NEGATIVE, default=0.0)
    decoupled_lr: float | None = flag(
        "Highest learning rate of the word embedding and the output layer, where it is not --lr.",
        POSITIVE,
        default=None,
    )
    decoupled_min_lr: float | None = flag(
        "With --decoupled-lr: what it decays to; without it --min-lr.",
        NOT_NEGATIVE,
        default=None,
        relations=Relations(needs=(given("--decoupled-lr"),)),
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "Shape of the decay; WSD stays at --lr until its last steps.", default="linear"
    )
    lr_decay_samples: int | None = computed(
        derived.lr_decay_samples,
        Flag("--lr-decay-iters", "Step at which the decay ends; without it, the last step.", COUNT),
        Flag(
            "--lr-decay-samples",
            "The same in samples, with --train-samples.",
            COUNT,
            relations=Relations(in_steps="--lr-decay-iters"),
        ),
    )
    lr_warmup_samples: int = computed(
        derived.lr_warmup_samples,
        Flag(
            "--lr-warmup-iters",
            "Steps in which the learning rate rises.",
            COUNT_FROM_0,
            default=0,
            relations=Relations(excludes=("--lr-warmup-fraction",)),
        ),
        Flag(
            "--lr-warmup-samples",
            "The same in samples, with --train-samples.",
            COUNT_FROM_0,
            default=0,
            relations=Relations(in_steps="--lr-warmup-iters", excludes=("--lr-warmup-fraction",)),
        ),
    )
    lr_warmup_fraction: float | None = flag(
        "The same as a share of the steps until the decay ends.", BELOW_1, default=None
    )
    lr_warmup_init: float = flag("Learning rate from which the warmup rises.", NOT_NEGATIVE, default=0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "Shape of WSD's last steps.", default="exponential", relations=_OF_WSD
    )
    lr_wsd_decay_samples: int | None = computed(
        derived.lr_wsd_decay_samples,
        Flag("--lr-wsd-decay-iters", "How many steps those are.", or_off(COUNT), relations=_OF_WSD),
        Flag(
            "--lr-wsd-decay-samples",
            "The same in samples, with --train-samples.",
            or_off(COUNT),
            relations=Relations(in_steps="--lr-wsd-decay-iters", needs=(_IS_WSD,)),
        ),
    )


LOSS_SCALE_OPTIONS = {
    "constant": flag(
        "With --fp16: a constant scale of the loss; 0 for one that adapts, which is the default.",
        or_off(LOSS_SCALE),
        name="--loss-scale",
        relations=Relations(
            needs=_OF_FP16.needs,
            excludes=("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"),
        ),
    ),
    "initial": flag("With --fp16: scale to begin with.", LOSS_SCALE, name="--initial-loss-scale", relations=_OF_FP16),
    "minimum": flag(
        "With --fp16: the scale never goes below.", LOSS_SCALE, name="--min-loss-scale", relations=_OF_FP16
    ),
    "window": flag(
        "With --fp16: steps without overflow that double the scale.",
        COUNT,
        name="--loss-scale-window",
        relations=_OF_FP16,
    ),
    "hysteresis": flag("With --fp16: overflows from which on each halves the scale.", COUNT, relations=_OF_FP16),
}
"""Where the values of :class:`hetero.runtime.loss_scaler.LossScaleOptions` come from."""


@config_dataclass
class CheckpointConfig:
    """Says where state is saved and loaded; without ``save`` nothing is, without ``load`` weights come from the seed.

    save_interval: steps; ``None`` saves at the end alone.
    keep_last: checkpoints that stay; ``None`` keeps all.
    load_step: ``None`` is the newest.
    override_step: step from which the run goes on in place of that of the checkpoint; ``None`` for the latter.
    finetune: load weights alone, and begin at step 1 with fresh moments, schedule and data.
    copy_every: steps; ``None`` chooses by what copies take.
    """

    save: Path | None = flag(
        "Folder for checkpoints, which all hosts see. The end of the run is saved always.", default=None
    )
    save_interval: int | None = flag(
        "With --save: steps from one checkpoint to the next; 0 saves at the end alone.",
        or_off(COUNT),
        default=None,
        relations=_OF_SAVE,
    )
    keep_last: int | None = flag(
        "With --save: checkpoints to keep; without it all.",
        COUNT,
        name="--hetero-keep-last",
        default=None,
        relations=_OF_SAVE,
    )
    asynchronous: bool = flag(
        "With --save: write in the background while training goes on.",
        name="--async-save",
        default=False,
        relations=_OF_SAVE,
    )
    load: Path | None = flag(
        "Folder of checkpoints, saved under any plan; the run goes on where the newest ends.", default=None
    )
    load_step: int | None = flag(
        "With --load: the checkpoint of this step instead; 0 for the newest.",
        or_off(COUNT),
        name="--ckpt-step",
        default=None,
        relations=_OF_LOAD,
    )
    override_step: int | None = flag(
        "With --load: go on as if the checkpoint were of this step, so with the data after it; learning rate and "
        "optimizer go on where the checkpoint has them.",
        COUNT_FROM_0,
        name="--override-ckpt-iteration",
        default=None,
        relations=Relations(needs=_OF_LOAD.needs, excludes=("--finetune",)),
    )
    finetune: bool = flag(
        "With --load: weights alone; steps, moments and data start from zero.", default=False, relations=_OF_LOAD
    )
    copy_every: int | None = flag(
        "In elastic training: steps from one copy on other nodes to the next; without it, as few as the network and "
        "the step allow.",
        COUNT,
        name="--hetero-elastic-copy-every",
        default=None,
    )

    @property
    def resumes(self) -> bool:
        """Whether the run, started again with these flags, goes on from the newest checkpoint that it has saved."""
        starts_elsewhere = self.load_step is not None or self.override_step is not None or self.finetune
        return self.load is not None and self.load == self.save and not starts_elsewhere


@config_dataclass
class RunConfig:
    """Says how long to train, from which seed, and when to evaluate.

    train_samples: what the schedules take for the length of the run; its last step may have no room for all of them.
    eval_iters: global batches of an evaluation, every ``eval_interval`` steps from ``start_eval_at_iter`` on and at the
        end; 0 for none.
    eval_global_batch_size: samples of each of them; ``None`` for as many as the plan's.
    exit_interval: leave at a step that is a multiple of it; ``exit_duration_minutes``: leave after that time.
    check_for_nan: end with an error at a loss or a gradient that is not finite, unless a loss scale adapts to it.
    """

    train_iters: int = computed(
        derived.train_iters,
        Flag(
            "--train-iters",
            "Steps to train. This or --train-samples is required.",
            COUNT,
            relations=Relations(excludes=("--train-samples",)),
        ),
        Flag(
            "--train-samples",
            "Samples to train; those that do not fill a step of --global-batch-size are left out.",
            COUNT,
        ),
    )
    train_samples: int = computed(derived.train_samples)
    seed: int = flag("Decides initial weights, dropout and the order of samples.", SEED, default=1234)
    eval_iters: int = flag("Global batches of an evaluation on validation data; 0 for none.", COUNT_FROM_0, default=0)
    eval_interval: int = flag("Steps from one evaluation to the next.", COUNT, default=1000, relations=_OF_EVALUATION)
    start_eval_at_iter: int = flag(
        "First step after which a run evaluates; it also evaluates at its end.",
        COUNT_FROM_0,
        default=0,
        relations=_OF_EVALUATION,
    )
    eval_global_batch_size: int | None = computed(
        derived.eval_global_batch_size,
        Flag(
            "--eval-global-batch-size",
            "Samples of one global batch of an evaluation; without it, as many as of a step.",
            COUNT,
            relations=Relations(needs=_OF_EVALUATION.needs, excludes=("--hetero-emulate",)),
        ),
    )
    exit_interval: int | None = flag(
        "Save and leave after a step that is a multiple of this; 0 for never.", or_off(COUNT), default=None
    )
    exit_duration_minutes: float | None = flag(
        "Save and leave after this time; 0 for never. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 do so at once.",
        or_off(POSITIVE),
        name="--exit-duration-in-mins",
        default=None,
    )
    check_for_nan: bool = flag(
        "End with an error at a loss or a gradient that is not finite; a loss scale that adapts skips such steps. On "
        "unless --no-check-for-nan-in-loss-and-grad is given, which skips them always.",
        name="--check-for-nan-in-loss-and-grad",
        off="--no-check-for-nan-in-loss-and-grad",
        default=True,
    )
    yaml_cfg: Path | None = flag(
        "A YAML file of Megatron-LM's with flags, by their names with underscores; where the command line has one as "
        "well, that counts.",
        default=None,
    )
