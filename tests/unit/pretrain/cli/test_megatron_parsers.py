"""Every flag of the parsers that come with megatron-core is decided here, with its number of values and its choices."""

import argparse

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.fields import Flag
from megatron.pretrain.cli.preprocess_flags import IGNORED_PREPROCESS_FLAGS, REFUSED_PREPROCESS_FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS, values_that_ask_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT
from tests.helpers import flag_table
from tests.helpers.flags import parse
from tests.helpers.megatron_parsers import (
    PREPROCESS_DATA,
    VERSIONS,
    ask_installed_parser,
    installed_version,
    recorded_parser,
)
from tools import preprocess_data

SUPPORTED = {name: flag for flag in FLAGS for name in flag.names}

OTHER_NUMBERS = {
    # One loss and its weight; several of them are refused.
    "--moe-router-load-balancing-type": 1,
    "--moe-aux-loss-coeff": 1,
    # rules.py counts the three and says what each is.
    "--rampup-batch-size": float("inf"),
}
"""Supported flags that take another number of values than in Megatron-LM."""


def most_values(flag: Flag) -> float:
    return 0 if flag.is_switch else float("inf") if flag.many else 1


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_is_decided(version: str) -> None:
    decided = {*SUPPORTED, *UNSUPPORTED_FLAGS, *WITHOUT_EFFECT}
    assert sorted(set(recorded_parser(version)) - decided) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_flags_take_as_many_values_as_there(version: str) -> None:
    theirs = recorded_parser(version)
    accepted = {name: most_values(flag) for name, flag in SUPPORTED.items()}
    accepted |= {name: flag.most_values for name, flag in WITHOUT_EFFECT.items()}
    expected = {name: theirs[name].most_values for name in accepted if name in theirs} | OTHER_NUMBERS
    assert {name: accepted[name] for name in expected} == expected


def test_several_values_of_a_flag_that_takes_one_here_are_refused() -> None:
    for name in [name for name, number in OTHER_NUMBERS.items() if number == 1]:
        with pytest.raises(ConfigError, match=rf"^unexpected '2' after the value of {name}, which takes one: leave it"):
            parse(f"{name} 1 2".replace("-type 1", "-type aux_loss"), "--num-experts 4 --disable-bias-linear")


@pytest.mark.parametrize("name", [name for name, flag in SUPPORTED.items() if flag_table.refused_choices(flag)])
def test_a_choice_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    flag = SUPPORTED[name]
    assert flag.type is not None
    for choice in flag_table.refused_choices(flag):
        with pytest.raises(ConfigError) as error:
            parse(f"{name} {choice}", without=name)
        [line] = [line for line in str(error.value).splitlines() if line.startswith(f"{name}: {choice!r} is not ")]
        assert flag.type.limit in line


def test_refused_choices_are_those_that_were_looked_at() -> None:
    """A choice that is new in Megatron-LM shows up here."""
    assert {name: refused for name, flag in SUPPORTED.items() if (refused := flag_table.refused_choices(flag))} == {
        "--cross-entropy-fusion-impl": ["te"],
        "--dataloader-type": ["cyclic", "external"],
        "--fp8-recipe": ["custom"],
        "--moe-router-load-balancing-type": ["global_aux_loss", "sinkhorn", "quantile_balancing"],
        "--optimizer": ["sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"],
        "--position-embedding-type": ["mrope", "relative", "none", "yarn"],
        "--tokenizer-type": [
            *("BertWordPieceLowerCase", "BertWordPieceCase", "TikTokenizer", "MultimodalTokenizer"),
            *("NullMultimodalTokenizer", "SFTTokenizer"),
        ],
        "--transformer-impl": ["inference_optimized"],
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_what_asks_for_nothing_is_a_value_there(version: str) -> None:
    """A refused flag is let pass with the default of Megatron-LM alone, or with what switches it off."""
    theirs = recorded_parser(version)
    for name in set(UNSUPPORTED_FLAGS) & set(theirs):
        for value in values_that_ask_for_nothing(name):
            assert not theirs[name].choices or value in theirs[name].choices
            assert theirs[name].values == "1"


def test_defaults_that_differ_are_said_with_the_reason() -> None:
    differing = {flag.name for flag in FLAGS if flag_table.other_default(flag)}
    assert differing == {*flag_table.OTHER_DEFAULTS, *flag_table.SAME_MEANING}


def test_supported_flags_have_the_same_default_in_all_versions() -> None:
    """So that a command line means the same, whichever megatron-core is installed."""
    for name in SUPPORTED:
        defaults = {recorded_parser(version)[name].default for version in VERSIONS if name in recorded_parser(version)}
        assert len(defaults) <= 1, name


def test_every_flag_of_preprocess_data_is_decided() -> None:
    theirs = recorded_parser(PREPROCESS_DATA)
    ours: dict[str, argparse.Action] = {
        name: action for action in preprocess_data._parser()._actions for name in action.option_strings
    }
    assert sorted(set(theirs) - {*ours, *IGNORED_PREPROCESS_FLAGS, *REFUSED_PREPROCESS_FLAGS}) == []
    ignored = {name: flag.most_values for name, flag in IGNORED_PREPROCESS_FLAGS.items() if name in theirs}
    assert ignored == {name: theirs[name].most_values for name in ignored}


@pytest.mark.skipif(installed_version() not in VERSIONS, reason="no record of a parser of this megatron-core")
def test_the_record_is_what_the_installed_parser_says() -> None:
    """python -m tests.helpers.megatron_parsers writes it."""
    assert ask_installed_parser() == recorded_parser(installed_version())
