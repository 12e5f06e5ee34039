"""From words to values: values of the wrong type, values without a flag, names, ``--help``."""

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import FLAGS
from tests.helpers.flags import command, parse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # Values of the wrong kind.
        ("--num-layers 0", "--num-layers: '0' is not a whole number of at least 1"),
        ("--num-layers 2.5", "--num-layers: '2.5' is not a whole number"),
        ("--num-layers=", "--num-layers: '' is not a whole number"),
        ("--lr nan", "--lr: 'nan' is not a number above 0"),
        ("--lr -1e-4", "--lr: '-1e-4' is not a number above 0"),
        ("--seed -1", "--seed: '-1' is not a whole number of at least 0"),
        ("--hidden-dropout 1", "--hidden-dropout: '1' is not a number from 0 to below 1"),
        ("--rotary-percent 0", "--rotary-percent: '0' is not a number above 0 and up to 1"),
        ("--lr-decay-style cosin", "(did you mean 'cosine'?)"),
        ("--tokenizer-type BertWordPieceCase", "HuggingFaceTokenizer (which reads any model's tokenizer.json)"),
        ("--split 0,1", "--split: '0,1' is not one to three shares"),
        ("--split 1e2,1", "--split: '1e2,1' is not one to three shares"),
        (
            "--tensorboard-dir=",
            "--tensorboard-dir: '' is not a path in a mounted file system; is a variable of",
        ),
        ("--lr", "--lr: expected one argument"),
        ("--data-path --swiglu", "--data-path: expected at least one argument"),
        # Values without a flag.
        ("--swiglu true", "--swiglu takes no value, found 'true'"),
        ("--swiglu=true", "--swiglu takes no value, found 'true'"),
        ("--seed 1 2", "unexpected '2' after the value of --seed"),
        ("--seed=1 2", "unexpected '2' after the value of --seed"),
        # Names.
        ("--micro-batchsize 4", "unknown flag --micro-batchsize (did you mean '--micro-batch-size'?)"),
        ("--num_layers=4", "unknown flag --num_layers (did you mean '--num-layers'?)"),
        ("--zzz", "unknown flag --zzz"),
        ("--", "unknown flag --"),
        ("-x", "unknown flag -x"),
        ("--seq 32", "unknown flag --seq "),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flags)
    assert message in str(error.value)


def test_another_auxiliary_loss_is_no_misspelt_one() -> None:
    with pytest.raises(ConfigError) as error:
        parse("--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type global_aux_loss")
    name = "--moe-router-load-balancing-type"
    assert str(error.value) == f"{name}: 'global_aux_loss' is not one of none, aux_loss, seq_aux_loss"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--distributed-timeout-minutes 0.0001", "'0.0001' is not a number of minutes from 0.5, in which"),
        (
            "--hetero-heartbeat-timeout 1",
            "'1' is not a number of seconds from 3, as ranks give one sign a second",
        ),
        ("--distributed-timeout-minutes 1e-300", "is not a number of minutes from 0.5"),
        ("--distributed-timeout-minutes 1e300", "to 10080, a week"),
        ("--distributed-timeout-minutes nan", "is not a number of minutes"),
        ("--hetero-plan-time-limit 1e-9", "is not a number of seconds from 0.1 to 604800, a week"),
        ("--hetero-plan-time-limit 1e300", "is not a number of seconds from 0.1 to 604800, a week"),
        ("--hetero-emulate-time-scale 1e-300", "is not a number from 0.0001 to 10000"),
        ("--hetero-emulate-time-scale 1e300", "is not a number from 0.0001 to 10000"),
        ("--initial-loss-scale 1e300", "is not a number above 0 and up to 2^127"),
        ("--lr inf", "'inf' is not a number above 0"),
        ("--lr nan", "'nan' is not a number above 0"),
        ("--seed 4294967296", "is not a whole number of at least 0 and at most 4294967295"),
        ("--num-workers 100000", "is not a whole number of at least 0 and at most 1024"),
        ("--train-iters 9223372036854775808", "at most 1000000000000"),
        (f"--train-iters {'9' * 5000}", "'" + "9" * 60 + "...' is not a whole number"),
        (f"--split {'9' * 400},1", "is not one to three shares"),
    ],
)
def test_a_value_near_zero_or_beyond_reason_is_refused_at_once(flag: str, message: str) -> None:
    """Further on, they end in tracebacks of whoever takes them: TCPStore, timedelta, numpy, the loader's processes."""
    with pytest.raises(ConfigError) as error:
        parse(flag)
    assert message in str(error.value)
    assert str(error.value).startswith(flag.split()[0])


def test_a_value_in_front_of_every_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected 'pretrain_gpt"):
        parse_args(["pretrain_gpt.py", *command()])


def test_a_flag_and_its_value_may_be_one_word() -> None:
    assert parse("--seed=7") == parse("--seed 7")


def test_the_last_of_equal_flags_counts() -> None:
    assert parse("--seed 7 --seed 8").run.seed == 8


def test_help_prints_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_args(["--save", "x", "--help"])
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert [name for flag in FLAGS for name in flag.names if name not in printed] == []
