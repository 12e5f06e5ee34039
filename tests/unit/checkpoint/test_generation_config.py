"""Where a text ends is in an export as in the source, in training or in the tokenizer's files; or it is null."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero.checkpoint.folder import find_checkpoint, read_state
from hetero.checkpoint.interchange.convert import Conversion, convert
from hetero.checkpoint.interchange.families import config_of
from hetero.errors import ConfigError
from hetero.spec.hugging_face.families import TABLES
from hetero.spec.hugging_face.generation import read_generation_config
from hetero.spec.hugging_face.keys import Ignored
from hetero.spec.model_import import from_hugging_face
from tests.helpers.transformers_models import SMALL, config_json
from tools.convert_checkpoint import main

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt2")
PROMPT_BS = torch.tensor([[5, 6, 7]])
NUM_NEW_TOKENS = 20


def random_model(family: str, **ids: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[family](**SMALL[family] | ids)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def generated(folder: Path) -> list[int]:
    """What the model in ``folder`` says after the prompt, without drawing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    out = model.generate(PROMPT_BS, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, PROMPT_BS.shape[1] :].tolist()


def exported(folder: Path, *, through_ours: bool) -> Path:
    """Convert ``folder`` to Hugging Face's format, directly or through our own."""
    out = folder.parent / f"out_{through_ours}"
    source, source_format = folder, "hf"
    if through_ours:
        source, source_format = folder.parent / "ours", "hetero"
        assert main(["--from", "hf", "--to", "hetero", "--input", str(folder), "--output", str(source)]) == 0
    assert main(["--from", source_format, "--to", "hf", "--input", str(source), "--output", str(out)]) == 0
    return out


@pytest.mark.parametrize("through_ours", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_stops_at_the_end_that_the_source_has(tmp_path: Path, family: str, through_ours: bool) -> None:
    """It went on to its limit."""
    random_model(family).save_pretrained(tmp_path / "endless")
    endless = generated(tmp_path / "endless")
    assert len(endless) == NUM_NEW_TOKENS
    end = endless[4]
    length = endless.index(end) + 1
    random_model(family, bos_token_id=3, eos_token_id=end, pad_token_id=4).save_pretrained(tmp_path / "in")
    assert generated(tmp_path / "in") == endless[:length]
    out = exported(tmp_path / "in", through_ours=through_ours)
    assert generated(out) == endless[:length]
    for found in (transformers.AutoConfig.from_pretrained(out), transformers.GenerationConfig.from_pretrained(out)):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (3, end, 4)


@pytest.mark.parametrize("through_ours", [True, False])
def test_all_of_generation_config_comes_along(tmp_path: Path, through_ours: bool) -> None:
    """Several ends and how tokens are drawn, as chat models have; its ids count before those of config.json."""
    random_model("llama", bos_token_id=3, eos_token_id=9).save_pretrained(tmp_path / "in")
    stated = {"eos_token_id": [7, 8, 9], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({**stated, "transformers_version": "4.42.3"}))
    out = exported(tmp_path / "in", through_ours=through_ours)
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 3, **stated}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [7, 8, 9]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == [7, 8, 9]
    assert model.generation_config.temperature == 0.6


@pytest.mark.parametrize("given", [".", "config.json"])
def test_a_megatron_checkpoint_ends_a_text_as_its_hugging_face_model_does(tmp_path: Path, given: str) -> None:
    """The checkpoint says nothing of tokens, and --model names them."""
    random_model("llama", bos_token_id=3, eos_token_id=9).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 5}')
    paths = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "theirs")]
    assert main(["--from", "hf", "--to", "megatron", *paths]) == 0
    paths = ["--input", str(tmp_path / "theirs"), "--output", str(tmp_path / "out")]
    assert main(["--from", "megatron", "--to", "hf", *paths, "--model", str(tmp_path / "in" / given)]) == 0
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 3, "eos_token_id": [7, 9], "top_k": 5}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [7, 9]


@pytest.mark.parametrize("through_ours", [True, False])
def test_parameters_of_an_older_config_come_along(tmp_path: Path, through_ours: bool) -> None:
    """transformers takes them from there where no generation_config.json is; the export drew no tokens."""
    random_model("llama", eos_token_id=9).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink()
    path = tmp_path / "in" / "config.json"
    drawn = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_length": 50}
    path.write_text(json.dumps(json.loads(path.read_text()) | drawn))
    out = exported(tmp_path / "in", through_ours=through_ours)
    for folder in (tmp_path / "in", out):
        read = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert {key: getattr(read, key) for key in drawn} == drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_known_is_null(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers filled in ids of another vocabulary: 1 and 2, or 50256."""
    random_model(family).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink()
    out = exported(tmp_path / "in", through_ours=True)
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [None] * 3
    assert not (out / "generation_config.json").exists()
    read = transformers.AutoConfig.from_pretrained(out)
    assert (read.bos_token_id, read.eos_token_id, read.pad_token_id) == (None, None, None)
    assert "eos_token_id null" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_left_to_the_class_of_transformers(family: str) -> None:
    """None that changes parameters, arithmetic, or where a text ends: another class, or version, has other defaults."""
    model = from_hugging_face(config_json(family), source="config.json")
    written = config_of(model, family, torch.float32)
    counts = {key for key, rule in TABLES[family].items() if not isinstance(rule, Ignored)}
    counts |= {"bos_token_id", "eos_token_id", "pad_token_id"}
    counts |= {"attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "router_jitter_noise"}
    theirs = transformers.CONFIG_MAPPING[family]().to_dict()
    assert counts & theirs.keys() - written.keys() == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written(family: str) -> None:
    """No value that it replaces by its own."""
    model = from_hugging_face(config_json(family), source="config.json")
    written = config_of(model, family, torch.float32, {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 0})
    read = transformers.CONFIG_MAPPING[family].from_dict(dict(written)).to_dict()
    differing = {key: (written[key], read[key]) for key in written.keys() & read.keys() if written[key] != read[key]}
    assert differing.keys() <= {"dtype"}


def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    random_model("llama", bos_token_id=3, eos_token_id=9).save_pretrained(tmp_path / "in")
    convert(Conversion(source_format="hf", target_format="hetero", source=tmp_path / "in", target=tmp_path / "ours"))
    state = read_state(find_checkpoint(tmp_path / "ours", None))
    assert state.generation_config is not None
    assert state.generation_config["eos_token_id"] == 9
    assert state.generation_config["bos_token_id"] == 3


class TestReading:
    def test_ids_of_either_file(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "pad_token_id": null, "top_k": 5}')
        config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "vocab_size": 9}
        expected = {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 3, "top_k": 5}
        assert read_generation_config(tmp_path, config) == expected

    @pytest.mark.parametrize("nothing", [None, []])
    def test_nothing(self, tmp_path: Path, nothing: Any) -> None:
        assert read_generation_config(tmp_path, {"eos_token_id": nothing, "top_p": None}) == {}
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": nothing}))
        assert read_generation_config(tmp_path, {"eos_token_id": 2, "top_p": 0.9}) == {"eos_token_id": 2}

    @pytest.mark.parametrize("value", ['"</s>"', "true", "[1, null]", "1.5", "{}"])
    def test_an_id_that_is_none(self, tmp_path: Path, value: str) -> None:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is .*, must be a token's id"):
            read_generation_config(tmp_path, {})
        with pytest.raises(ConfigError, match=r"/config\.json: eos_token_id is .*, must be a token's id"):
            read_generation_config(tmp_path / "without", {"eos_token_id": json.loads(value)})

    @pytest.mark.parametrize(("content", "said"), [("[]", "not a JSON object"), ("{", "not JSON"), ("", "empty")])
    def test_another_file(self, tmp_path: Path, content: str, said: str) -> None:
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{said}"):
            read_generation_config(tmp_path, {})

    def test_a_file_that_every_checkpoint_would_carry(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(range(20_000))}))
        with pytest.raises(ConfigError, match=r"it has [\d,]+ bytes, at most 65,536 are carried over"):
            read_generation_config(tmp_path, {})
