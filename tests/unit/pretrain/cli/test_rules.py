"""Which flags go together: what is refused, and with which words."""

import ast
import inspect
import re
from types import ModuleType

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli import derived, rules
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.fields import Flag, FlagValues
from tests.helpers.flags import GROWING_DECAY, MOE, ROPE, SCALED, WSD, command, parse


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-model-parallel-size 1",
        "--pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--micro-batch-size 1",
        "--sequence-parallel",
        "--recompute-granularity full",
        "--recompute-num-layers 1",
        "--hetero-schedule gpipe",
    ],
)
def test_a_plan_states_what_the_uniform_plans_flags_would(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} beside --hetero-plan plan.json: the plan states it"):
        parse("--hetero-plan plan.json", flag, without="--micro-batch-size")
    with pytest.raises(ConfigError, match=f"^{flag} beside --hetero-cluster c.yaml: the plan states it"):
        parse("--hetero-cluster c.yaml", flag, without="--micro-batch-size")


@pytest.mark.parametrize(
    ("flags", "without", "message"),
    [
        # Missing.
        ("", "--num-layers --lr", "required and missing: --num-layers, --lr"),
        ("", "--micro-batch-size", "required and missing: --micro-batch-size (or --hetero-plan, --hetero-cluster or"),
        ("", "--train-iters", "required and missing: --train-iters (or --train-samples)"),
        ("", "--mock-data", "required and missing: --data-path (or --train-data-path or --mock-data)"),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1", "", "needs both --start-weight-decay and --end"),
        ("--lr-decay-style WSD", "", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --train-samples 80", "--train-iters", "needs --lr-wsd-decay-samples"),
        ("--tokenizer-type HuggingFaceTokenizer", "", "needs --tokenizer-model"),
        (
            "--tokenizer-type Llama2Tokenizer",
            "",
            "Llama2Tokenizer needs --tokenizer-model: a SentencePiece model, or the folder that has its",
        ),
        ("--vocab-file v", "--tokenizer-type", "--tokenizer-type GPT2BPETokenizer needs --merge-file"),
        ("--vocab-file v", "", "--vocab-file v has no effect: --tokenizer-type NullTokenizer reads no file"),
        ("", "--tokenizer-type", "required and missing: --tokenizer-type (or --vocab-file)"),
        ("", "--vocab-size", "NullTokenizer needs --vocab-size"),
        # Contradictions.
        ("--train-samples 800", "", "--train-iters 100 and --train-samples 800 exclude each other"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "", "exclude each other"),
        ("--train-samples 80 --lr-warmup-samples 8 --lr-warmup-fraction 0.1", "--train-iters", "exclude each other"),
        ("--data-path a b", "", "--mock-data and --data-path a b exclude each other"),
        ("--train-data-path a", "", "--mock-data and --train-data-path a exclude each other"),
        ("--data-path a --valid-data-path b", "--mock-data", "exclude each other"),
        ("--position-embedding-type learned_absolute --use-rotary-position-embeddings", "", "exclude each other"),
        ("--lr-decay-samples 80", "", "--lr-decay-samples 80 beside --train-iters 100: use --lr-decay-iters"),
        ("--lr-warmup-iters 1 --train-samples 80", "--train-iters", "use --lr-warmup-samples with --train-samples"),
        ("--hetero-plan auto", "--micro-batch-size", "--hetero-plan auto: plans for a cluster, so add"),
        (
            "--hetero-emulate c --distributed-backend nccl",
            "--micro-batch-size",
            "--distributed-backend nccl beside --hetero-emulate: the CPU computes; leave the backend out",
        ),
        (
            "--hetero-emulate c --hetero-cluster c",
            "--micro-batch-size",
            "--hetero-cluster c and --hetero-emulate c exclude each other",
        ),
        (
            "--hetero-emulate-time-scale 2",
            "",
            "--hetero-emulate-time-scale 2.0 has no effect without --hetero-emulate: add that",
        ),
        (
            "--hetero-cluster c --hetero-plan-time-limit 900",
            "--micro-batch-size",
            "lower the first or raise the second",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
            "",
            "--num-virtual-stages-per-pipeline-rank 2 and --num-layers-per-virtual-pipeline-stage 1 exclude each other",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "",
            "--num-layers-per-virtual-pipeline-stage 3 x --pipeline-model-parallel-size 2 does not divide "
            "--num-layers 4: change one, or give an uneven plan with --hetero-plan",
        ),
        ("--bf16 --fp16", "", "--bf16 and --fp16 exclude each other"),
        ("--fp16 --bf16 --train-samples 8", "", "--bf16 and --fp16 exclude each other"),
        ("--fp16 --loss-scale 8 --hysteresis 1", "", "--loss-scale 8.0 and --hysteresis 1 exclude each other"),
        ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "", "--min-loss-scale 4.0 is above --initial-loss-scale"),
        (
            "--cpu-offloading-num-layers 2 --recompute-granularity full",
            "",
            "--cpu-offloading-num-layers 2 and --recompute-granularity full exclude each other",
        ),
        # No effect.
        ("--bf16 --loss-scale 8", "", "--loss-scale 8.0 has no effect without --fp16"),
        ("--recompute-num-layers 2", "", "has no effect without --recompute-granularity full"),
        ("--overlap-param-gather", "", "has no effect without --use-distributed-optimizer"),
        ("--optimizer-cpu-offload", "", "has no effect without --use-distributed-optimizer"),
        ("--optimizer-offload-fraction 0.5", "", "has no effect without --optimizer-cpu-offload"),
        ("--hetero-cluster c --overlap-param-gather", "--micro-batch-size", "without --use-distributed-optimizer"),
        ("--save-interval 5", "", "--save-interval 5 has no effect without --save"),
        ("--enable-msc --save msc://p/run", "", "--save: 'msc://p/run' is not a path in a mounted file system"),
        ("--load=S3://bucket/run", "", "--load: 'S3://bucket/run' is not a path in a mounted file system"),
        ("--save=", "", "--save: '' is not a path in a mounted file system; is a variable of the script empty?"),
        ("--finetune", "", "--finetune has no effect without --load"),
        ("--eval-interval 5", "", "--eval-interval 5 has no effect without --eval-iters above 0"),
        ("--hetero-plan-out p.json", "", "--hetero-plan-out p.json has no effect without a cluster and no plan"),
        ("--hetero-cluster c --hetero-plan p --hetero-data-sheets", "--micro-batch-size", "has no effect without"),
        ("--num-query-groups 2", "", "--num-query-groups 2 has no effect without --group-query-attention"),
        ("--rotary-base 500000", "", "has no effect without --position-embedding-type rope"),
        ("--moe-router-topk 1", "", "--moe-router-topk 1 has no effect without --num-experts"),
        (
            f"{MOE} --moe-router-load-balancing-type none",
            "",
            "without --moe-router-load-balancing-type aux_loss or seq_aux_loss",
        ),
        ("--lr-wsd-decay-iters 10", "", "has no effect without --lr-decay-style WSD"),
        ("--start-weight-decay 0.1", "", "has no effect without --weight-decay-incr-style linear or cosine"),
        ("--weight-decay 0.1 --end-weight-decay 0.2", "", "has no effect without --weight-decay-incr-style linear or"),
        ("--bf16 --min-loss-scale 2", "", "--min-loss-scale 2.0 has no effect without --fp16"),
        (f"{GROWING_DECAY} --weight-decay 0.1", "", "--weight-decay 0.1 has no effect"),
        (
            "--weight-decay 0.01 --start-weight-decay 0.1 --end-weight-decay 0.1",
            "",
            "--weight-decay 0.01 and --start-weight-decay 0.1 --end-weight-decay 0.1 are two values of a constant",
        ),
        ("--start-weight-decay 0.1 --end-weight-decay 0.2", "", "--end-weight-decay 0.2 has no effect without"),
        ("--num-query-groups 1 --recompute-method all", "", "'all' is not one of block, uniform"),
        ("--data-path a --tokenizer-model t", "--mock-data", "--tokenizer-model t has no effect"),
        ("--train-data-path a --split 1", "--mock-data", "--split 1 has no effect without --data-path"),
        # Numbers that do not fit one another.
        ("--num-attention-heads 5", "", "--num-attention-heads 5 does not divide --hidden-size 48"),
        ("--group-query-attention --num-query-groups 4", "", "--num-query-groups 4 does not divide"),
        ("--position-embedding-type rope --rotary-percent 0.4", "", "rotates 3 channels"),
        ("--use-rope-scaling", "", "has no effect without --position-embedding-type rope"),
        (f"{ROPE} --rope-scaling-factor 32", "", "has no effect without --use-rope-scaling"),
        (f"{SCALED} --rotary-seq-len-interpolation-factor 4", "", "exclude each other"),
        (f"{SCALED} --rope-scaling-factor 0.5", "", "'0.5' is not a number of at least 1"),
        (f"{SCALED} --hetero-rope-low-freq-factor 4", "", "4.0 is not below --hetero-rope-high-freq-factor 4.0"),
        ("--hetero-add-proj-bias", "", "has no effect without --disable-bias-linear"),
        ("--hidden-size 12 --swiglu", "", "--hidden-size 12 with --swiglu"),
        ("--swiglu --hetero-relu", "", "--hetero-relu and --swiglu exclude each other"),
        ("--seq-length 65", "", "--max-position-embeddings 64 is below --seq-length 65"),
        ("--num-experts 4", "", "add --disable-bias-linear"),
        (f"{MOE} --moe-router-topk 5", "", "--moe-router-topk 5 exceeds --num-experts 4"),
        ("--min-lr 0.1", "", "--min-lr 0.1 is above --lr 0.01"),
        ("--lr-warmup-init 0.1", "", "--lr-warmup-init 0.1 is above --lr 0.01"),
        ("--lr-warmup-iters 100", "", "the warmup of 100 steps does not end before"),
        ("--lr-warmup-iters 50 --lr-decay-iters 50", "", "lower --lr-warmup-iters"),
        (f"{WSD} --lr-warmup-iters 91", "", "do not fit into the 100 steps"),
        (f"{WSD} --lr-warmup-fraction 0.91", "", "do not fit into the 100 steps"),
        (f"{GROWING_DECAY} --end-weight-decay 0.05", "", "is below --start-weight-decay 0.1"),
        ("--train-samples 7", "--train-iters", "--train-samples 7 are fewer than one step's --global-batch-size 8"),
        (
            "--rampup-batch-size 4 2 9 --train-samples 3",
            "--train-iters",
            "--train-samples 3 are fewer than one step's --rampup-batch-size 4 2 9",
        ),
        ("--rampup-batch-size 4 2 --train-samples 80", "--train-iters", "4 2: 2 numbers, must be 3: START INCREMENT"),
        ("--rampup-batch-size 8 2 9 --train-samples 80", "--train-iters", "must be fewer than --global-batch-size 8"),
        ("--rampup-batch-size 1 2 9 --train-samples 80", "--train-iters", "increment 2 does not divide the 7 samples"),
        (
            "--rampup-batch-size 2 2 9 --train-samples 80 --global-batch-size 2080",
            "--train-iters",
            "1039 increments up to --global-batch-size 2080, at most 1024 are",
        ),
        ("--rampup-batch-size 0 2 9 --train-samples 80", "--train-iters", "--rampup-batch-size: '0' is not a whole"),
        (
            # Steps of 4, 4, 6, 8, ..., 8, of which the first ten are the decay.
            "--rampup-batch-size 4 2 12 --lr-decay-iters 10",
            "",
            "in place of steps give --train-samples 790 --lr-decay-samples 70",
        ),
        (
            "--rampup-batch-size 4 2 9 --train-samples 80 --hetero-emulate c",
            "--train-iters --micro-batch-size",
            "--rampup-batch-size 4 2 9 and --hetero-emulate c exclude each other",
        ),
        ("--micro-batch-size 3", "", "--global-batch-size 8 is no multiple of --micro-batch-size 3"),
        # A schedule of batch sizes; samples have 32 tokens.
        ("", "--global-batch-size", "required and missing: --global-batch-size (or --step-batch-size-schedule)"),
        (
            "--step-batch-size-schedule 0:8",
            "",
            "--global-batch-size 8 and --step-batch-size-schedule '0:8' exclude each other",
        ),
        (
            "--step-batch-size-schedule 0:2,64:8 --rampup-batch-size 4 2 9 --train-samples 80",
            "--train-iters --global-batch-size",
            "exclude each other",
        ),
        (
            "--step-batch-size-schedule 0:2,64:8 --train-samples 80 --hetero-emulate c",
            "--train-iters --global-batch-size --micro-batch-size",
            "and --hetero-emulate c exclude each other",
        ),
        (
            "--step-batch-size-schedule 1K:8 --train-samples 80",
            "--train-iters --global-batch-size",
            "'1000:8': begins at 1000 tokens, sample 31, must begin at 0; add the size of the first steps as 0:SAMPLES",
        ),
        (
            "--step-batch-size-schedule 0:2,64:4,95:8 --train-samples 80",
            "--train-iters --global-batch-size",
            "two sizes begin at sample 2, the second at 95 tokens: entries are at least --seq-length 32 apart",
        ),
        (
            # Steps of 2, 8, 8, ..., of which the first three are the decay.
            "--step-batch-size-schedule 0:2,64:8 --lr-decay-iters 3",
            "--global-batch-size",
            "'0:2 64:8' needs the length of the run in samples: in place of steps give --train-samples 794 "
            "--lr-decay-samples 18",
        ),
        (
            "--step-batch-size-schedule 0:3,64:8 --train-samples 80",
            "--train-iters --global-batch-size",
            "--step-batch-size-schedule '0:3 64:8': 3 samples are no multiple of --micro-batch-size 2: change one",
        ),
        *(
            (
                f"--step-batch-size-schedule {wrong} --train-samples 80",
                "--train-iters --global-batch-size",
                f"--step-batch-size-schedule: '{wrong}' is not one word of TOKENS:SAMPLES pairs in quotes",
            )
            for wrong in ("8", "0:0", "0:8,x:9", "0:1e", "0:1e400", "0:8:9", "0:", ",", "0:inf", "0:nan")
        ),
        # Evaluations.
        ("--start-eval-at-iter 5", "", "--start-eval-at-iter 5 has no effect without --eval-iters above 0"),
        ("--eval-global-batch-size 4", "", "--eval-global-batch-size 4 has no effect without --eval-iters above 0"),
        (
            "--eval-iters 1 --eval-global-batch-size 3",
            "",
            "--eval-global-batch-size 3 is no multiple of --micro-batch-size 2: change one",
        ),
        (
            "--eval-iters 1 --eval-global-batch-size 4 --hetero-emulate c",
            "--micro-batch-size",
            "--eval-global-batch-size 4 and --hetero-emulate c exclude each other",
        ),
        # What else Megatron-LM 0.17 and newer has.
        (
            "--no-pad-vocab-size --make-vocab-size-divisible-by 64",
            "",
            "--no-pad-vocab-size and --make-vocab-size-divisible-by 64 exclude each other",
        ),
        ("--null-tokenizer-eod-id 100", "", "--null-tokenizer-eod-id 100 is not below --vocab-size 100: change one"),
        (
            "--null-tokenizer-eod-id 7 --tokenizer-type ByteLevelTokenizer",
            "",
            "--null-tokenizer-eod-id 7 has no effect without --tokenizer-type NullTokenizer",
        ),
        ("--override-ckpt-iteration 0", "", "--override-ckpt-iteration 0 has no effect without --load"),
        (
            "--load l --finetune --override-ckpt-iteration 5",
            "",
            "--override-ckpt-iteration 5 and --finetune exclude each other",
        ),
        ("--position-embedding-type yarn", "", "'yarn' is not one of learned_absolute, rope; --use-rope-scaling and"),
    ],
)
def test_refused(flags: str, without: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flags, without=without)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "same_as"),
    [
        # With these values Megatron-LM does nothing either.
        ("--lr-warmup-samples 0", ""),
        ("--lr-warmup-samples 0 --lr-warmup-iters 10", "--lr-warmup-iters 10"),
        ("--lr-warmup-iters 0 --lr-warmup-fraction 0.1", "--lr-warmup-fraction 0.1"),
        ("--lr-warmup-iters 0 --train-samples 80", "--train-samples 80"),
        ("--exit-interval 0 --exit-duration-in-mins 0", ""),
        ("--save s --save-interval 0", "--save s"),
        ("--save-interval 0 --ckpt-step 0", ""),
        ("--load s --ckpt-step 0", "--load s"),
        ("--fp16 --loss-scale 0", "--fp16"),
        ("--fp16 --loss-scale 0 --hysteresis 1", "--fp16 --hysteresis 1"),
        ("--fp16 --loss-scale 8 --min-loss-scale 1.0", "--fp16 --loss-scale 8"),
        ("--bf16 --loss-scale 0 --min-loss-scale 1.0", "--bf16"),
        ("--cpu-offloading-num-layers 0 --recompute-granularity full", "--recompute-granularity full"),
        ("--weight-decay 0.1 --start-weight-decay 0.1 --end-weight-decay 0.1", "--weight-decay 0.1"),
        ("--start-weight-decay 0.1 --end-weight-decay 0.1", "--weight-decay 0.1"),
        ("--weight-decay-incr-style constant --start-weight-decay 0 --end-weight-decay 0.0", "--weight-decay 0"),
        ("--lr-wsd-decay-iters 0 --lr-wsd-decay-samples 0", ""),
        ("--num-query-groups 6", ""),
        ("--eval-iters 1 --eval-global-batch-size 8", "--eval-iters 1"),
        ("--eval-iters 1 --start-eval-at-iter 0", "--eval-iters 1"),
        ("--rotary-seq-len-interpolation-factor 1", ""),
        (f"{SCALED} --rotary-seq-len-interpolation-factor 1.0", SCALED),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--recompute-granularity full",
        ),
        ("--wandb-project= --wandb-entity= --wandb-exp-name= --wandb-save-dir=", ""),
    ],
)
def test_values_that_do_nothing_are_accepted(flags: str, same_as: str) -> None:
    without = "--train-iters" if "--train-samples" in flags else ""
    assert parse(flags, without=without) == parse(same_as, without=without)


@pytest.mark.parametrize(
    ("flags", "without", "messages"),
    [
        (
            "--step-batch-size-schedule bad --rampup-batch-size 1 2 --eval-iters 1 --eval-global-batch-size 7",
            "--global-batch-size",
            [
                "--step-batch-size-schedule: 'bad' is not one word of TOKENS:SAMPLES",
                "--rampup-batch-size 1 2: 2 numbers, must be 3",
                "--eval-global-batch-size 7 is no multiple of --micro-batch-size 2",
            ],
        ),
        (
            "--global-batch-size bad --eval-iters 1 --eval-global-batch-size 7",
            "--global-batch-size",
            ["--global-batch-size: 'bad' is not", "--eval-global-batch-size 7 is no multiple of"],
        ),
        # The samples of the decay are right once the run counts samples as well.
        (
            "--step-batch-size-schedule 0:2,64:8 --lr-decay-samples 80",
            "--global-batch-size",
            ["in place of steps give --train-samples 794"],
        ),
    ],
)
def test_all_that_is_wrong_with_batches_is_said_at_once(flags: str, without: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flags, without=without)
    lines = str(error.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


def test_details_of_what_is_switched_off_are_accepted() -> None:
    """Without --eval-iters 0, whose default that is, an interval would evaluate nothing by mistake."""
    assert parse("--eval-iters 0 --eval-interval 50").run.eval_iters == 0
    with pytest.raises(ConfigError, match="has no effect without --eval-iters above 0"):
        parse("--eval-interval 50")
    assert parse("--num-experts 0 --moe-router-topk 1 --moe-aux-loss-coeff 0.01").model.num_experts is None
    assert not parse("--optimizer-offload-fraction 0").parallel.optimizer_cpu_offload


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--nvtx-ranges", "nothing is profiled without --profile"),
        (
            "--nvtx-ranges --profile --use-pytorch-profiler --tensorboard-dir l",
            "torch's profiler records no NVTX ranges",
        ),
        (
            "--verify-integrity",
            "a checkpoint has the checksum of every part, and no part is loaded before it is verified",
        ),
        ("--eval-micro-batch-size 4", "an evaluation computes in the microbatches of the plan"),
    ],
)
def test_a_flag_that_changes_nothing_is_named_in_the_log(flags: str, note: str) -> None:
    reasons = dict(parse(flags).notes)
    assert reasons[flags.split()[0]].startswith(note)


def test_a_run_that_starts_elsewhere_does_not_resume_by_the_same_flags() -> None:
    assert parse("--load s --save s").checkpoint.resumes
    assert not parse("--load s --save s --override-ckpt-iteration 5").checkpoint.resumes


def test_a_weight_decay_that_grows_from_itself_to_itself() -> None:
    ends = "--start-weight-decay 0.1 --end-weight-decay 0.1"
    config = parse("--weight-decay-incr-style linear --weight-decay 0.1", ends)
    assert config.optimizer.start_weight_decay == config.optimizer.end_weight_decay == 0.1


@pytest.mark.parametrize(
    "flag",
    [flag for flag in FLAGS if not flag.is_switch and flag.default not in (None, ()) and flag.default != "none"],
    ids=lambda flag: flag.name,
)
def test_a_default_that_is_given_changes_nothing(flag: Flag) -> None:
    values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    words = [word for word in command() if word != flag.name]
    assert parse_args([*words, flag.name, *map(str, values)]) == parse_args(words)


@pytest.mark.parametrize("module", [rules, derived])
def test_rules_name_flags_that_exist(module: ModuleType) -> None:
    strings = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text for text in strings if re.fullmatch(r"--[a-z0-9-]*[a-z0-9]", text)}
    assert len(named) > 20
    assert named <= {name for flag in FLAGS for name in flag.names}


def test_relations_name_flags_that_exist() -> None:
    names = {flag.name for flag in FLAGS}
    defaults = FlagValues({flag.name: flag.default for flag in FLAGS}, frozenset())
    for relations in (flag.relations for flag in FLAGS):
        assert {*relations.excludes, *filter(None, [relations.in_steps])} <= names
        for condition in relations.needs:
            assert condition.holds(defaults) in (True, False), "a flag that is not there is a KeyError"
            assert set(re.findall(r"--[a-z0-9-]+", condition.fix)) <= names
