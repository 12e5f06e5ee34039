"""Reads how text is generated from a Hugging Face model: which tokens begin and end it, and how the next is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import parse_json, read_text

GENERATION_CONFIG = "generation_config.json"

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys that name tokens: the first of a text, those that end it, and the one that fills up a batch."""

GENERATION_PARAMETERS = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "constraints",
    "continuous_batching_config",
    "disable_compile",
    "diversity_penalty",
    "do_sample",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "sequence_bias",
    "speculation_type",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "use_mtp",
    "watermarking_config",
)
"""The keys that say how the next token is drawn. Older versions of ``transformers`` wrote them into ``config.json``."""

_MAX_BYTES = 65_536
"""Limit of a generation_config.json, which every checkpoint of a run carries; published ones have some 200 bytes."""

_OF_THE_FILE = ("_from_model_config", "transformers_version")
"""Keys that say how the file came to be."""

GenerationConfig = Mapping[str, Any]
"""The content of a generation_config.json: plain JSON values by key."""


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read how text is generated, from ``generation_config.json`` and from what ``config.json`` says of it.

    Where both name a token, the first counts, as in ``transformers``. A token that neither names is left out: the
    defaults of ``transformers`` are those of another vocabulary. :data:`GENERATION_PARAMETERS` of a ``config.json``
    count where there is no other file, as in ``transformers``.

    Args:
        folder: may have no ``generation_config.json``.
        config: the content of its ``config.json``.

    Raises:
        ConfigError: the file is no JSON object or too large, or the id of a token is no id.
    """
    path = folder / GENERATION_CONFIG
    stated = _read(path) if (is_there := path.is_file()) else {}
    _check_ids(stated, source=path)
    _check_ids(config, source=folder / "config.json")
    keys = TOKEN_IDS if is_there else (*TOKEN_IDS, *GENERATION_PARAMETERS)
    known = {key: config[key] for key in keys if key in config}
    known |= {key: value for key, value in stated.items() if not _is_unset(key, value)}
    return {key: value for key, value in known.items() if key not in _OF_THE_FILE and not _is_unset(key, value)}


def _is_unset(key: str, value: object) -> bool:
    """Whether a value says nothing: ``null``, or a list of tokens without one."""
    return value is None or (key in TOKEN_IDS and value == [])


def _read(path: Path) -> dict[str, Any]:
    if (size_bytes := path.stat().st_size) > _MAX_BYTES:
        raise ConfigError(
            f"{path}: it has {size_bytes:,} bytes, at most {_MAX_BYTES:,} are carried over; take out what it should "
            "not have, or move it away"
        )
    content = parse_json(read_text(path), source=str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def _check_ids(stated: Mapping[str, Any], *, source: Path) -> None:
    for key in TOKEN_IDS:
        value = stated.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in ids):
            raise ConfigError(f"{source}: {key} is {value!r}, must be a token's id, a list of ids, or null")
