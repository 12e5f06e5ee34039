"""The tables of keys against the classes of ``transformers``: no key is missing, no default and no reason is wrong."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers

from hetero.errors import ConfigError
from hetero.spec.hugging_face.families import TABLES
from hetero.spec.hugging_face.keys import REQUIRED, Ignored, Only, Read
from hetero.spec.model_import import from_hugging_face
from tests.helpers.transformers_models import config_json, float64_model, keys_of, probes

TOLERANCE = 1e-9
"""Of logits of about 1: one of their forms of GELU has a constant of ten digits."""

TOKENS_BS = torch.arange(32).reshape(2, 16) * 7 % 61


@pytest.mark.parametrize("family", TABLES)
def test_every_key_of_the_class_is_accounted_for(family: str) -> None:
    assert keys_of(family) - TABLES[family].keys() == set()


@pytest.mark.parametrize("family", TABLES)
def test_what_a_file_leaves_out_is_as_in_the_class(family: str) -> None:
    table = TABLES[family]
    seen = 0
    for field in dataclasses.fields(transformers.CONFIG_MAPPING[family]):
        account = table[field.name]
        match account:
            case Read(default=default) if default is not REQUIRED:
                assert default == field.default, field.name
            case Only():
                assert account.unless_given == field.default, field.name
            case _:
                continue
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize("family", TABLES)
def test_a_value_counts_or_is_refused_or_changes_nothing(family: str) -> None:
    """What leaves our model as it is leaves theirs as it is; all keys that are ignored at once, the others in turn.

    That they compute the same where a value counts is tested in tests/dist/test_transformers_parity.py.
    """
    config, table = config_json(family), TABLES[family]
    ours, theirs = from_hugging_face(config, source="a"), float64_model(config)
    ignored: dict[str, Any] = {}
    harmless, counting, refused = [ignored], set(), set()
    for changes in probes(family):
        if is_refused({**config, **changes}, naming=changes):
            refused |= changes.keys()
            continue
        changed = from_hugging_face({**config, **changes}, source="a")
        if changed != ours:
            counting |= changes.keys()
            for key in changes.keys() & {field.name for field in dataclasses.fields(ours)}:
                assert getattr(changed, key) == changes[key]
        elif all(isinstance(table[key], Ignored) for key in changes):
            ignored |= changes
        else:
            harmless.append(changes)
    # Keys of files that are none of the class: of its earlier versions and of other programs.
    # Those of text generation have values of their own, which transformers checks.
    cannot_be_set = {"model_type", "return_dict", "use_return_dict", *vars(transformers.GenerationConfig())}
    for key in table.keys() - ignored.keys() - cannot_be_set:
        if isinstance(table[key], Ignored):
            ignored[key] = "eager" if "attn_implementation" in key else True
            assert from_hugging_face({**config, key: ignored[key]}, source="a") == ours
    expected = logits(theirs)
    for changes in harmless:
        model = float64_model({**config, **changes})
        model.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=TOLERANCE, msg=str(changes))
    accounts = {key: table[key] for key in keys_of(family) - {"model_type", "return_dict"}}
    assert {key for key, account in accounts.items() if isinstance(account, Ignored)} <= ignored.keys()
    assert {key for key, account in accounts.items() if isinstance(account, Read) and account.into} <= counting
    assert {key for key, account in accounts.items() if isinstance(account, Only)} <= refused


@pytest.mark.parametrize("family", TABLES)
def test_what_only_generates_text_is_ignored(family: str) -> None:
    """Files have such keys where a program has set them on the configuration before it saved a model."""
    keys = {key for key in vars(transformers.GenerationConfig()) if not key.startswith("_")}
    assert len(keys) > 60
    assert {key for key in keys if not isinstance(TABLES[family].get(key), Ignored)} == set()


def is_refused(config: dict[str, Any], *, naming: Iterable[str]) -> bool:
    try:
        from_hugging_face(config, source="a")
    except ConfigError as error:
        message = str(error)
    else:
        return False
    assert any(key in message for key in naming), message
    return True


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS_BS).logits
