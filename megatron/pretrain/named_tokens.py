"""Reads which special tokens the files in the folder of a tokenizer name, as transformers reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import parse_json, read_text

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedToken:
    """A special token, by its text, and the file that names it."""

    token: str
    file: Path


def read_named_tokens(folder: Path) -> dict[str, NamedToken]:
    """Read the special tokens by their keys, such as ``eos_token``; empty if no file names one.

    Raises:
        ConfigError: a file is no JSON object.
    """
    contents = {name: read_json_object(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)}
    names = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP]
    if "added_tokens_decoder" not in contents[TOKENIZER_CONFIG]:
        # transformers lets the map overrule a configuration without this key (`_from_pretrained` of 5.23).
        names.reverse()
    tokens: dict[str, NamedToken] = {}
    for name in names:
        for key, value in contents[name].items():
            if key.endswith("_token") and (text := _text_of(value)):
                tokens.setdefault(key, NamedToken(token=text, file=folder / name))
    return tokens


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Read the object of a JSON file, which has no keys if the file is not there.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    content = parse_json(read_text(path), source=str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def _text_of(token: object) -> str:
    """Return the text of a token, which transformers writes as a text or as an object with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
