"""Turns a YAML configuration of Megatron-LM (``--yaml-cfg``) into the flags that say the same.

Its keys are the flags' names with underscores, and in the sections ``language_model`` and ``model_parallel`` those of
megatron-core's configurations, which say some things otherwise. Such a file states every setting, also those that ask
for nothing.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetero.errors import ConfigError
from hetero.file_kinds import FILE_KINDS, wrong_kind
from hetero.serialization import read_yaml
from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.unsupported import UNSUPPORTED_FLAGS, asks_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT

_SECTIONS = ("language_model", "model_parallel")

_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "add_bias_linear": "bias_linear",
        "add_position_embedding": "position_embedding",
        "apply_rope_fusion": "rope_fusion",
        "fp8": "fp8_format",
        "layernorm_epsilon": "norm_epsilon",
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
        "num_moe_experts": "num_experts",
        "overlap_p2p_comm": "overlap_p2p_communication",
        "perform_initialization": "initialization",
    }
)
"""Keys that are called otherwise than their flag, less its ``no`` or ``disable``."""

_ASKS_FOR_NOTHING: Mapping[str, Any] = MappingProxyType(
    {
        # Without a flag: how megatron-core's own schedule and layers work, which are not asked here.
        "barrier_with_L1_time": True,
        "batch_p2p_comm": True,
        "batch_p2p_sync": True,
        "bert_binary_head": True,
        "bias_activation_fusion": False,
        "cpu_offloading": False,
        "cpu_offloading_activations": True,
        "cpu_offloading_weights": False,
        "deallocate_pipeline_outputs": False,
        "delay_param_gather": False,
        "enable_autocast": False,
        "gated_linear_unit": False,
        "memory_efficient_layer_norm": False,
        "moe_token_dropping": False,
        "tp_comm_atomic_ag": True,
        "tp_comm_atomic_rs": True,
        "variable_seq_lengths": False,
        # With a flag that has no effect: Megatron-LM's defaults.
        "empty_unused_memory_level": 0,
        "fp8_interval": 1,
        "manual_gc_interval": 0,
    }
)
"""Keys that have one value here, or that have no meaning with this one."""

_ACTIVATIONS: Mapping[str, list[str]] = MappingProxyType(
    {"swiglu": ["--swiglu"], "gelu": [], "relu": ["--hetero-relu"], "squaredrelu": ["--squared-relu"]}
)


def with_yaml(argv: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Put the flags of the file behind ``--yaml-cfg`` in front of the others, which count if both name one.

    Returns:
        All words; and the flags that only the file names.

    Raises:
        ConfigError: the file is missing, is no YAML, or says what no flag says.
    """
    files = [word.partition("=")[2] for word in argv if word.startswith("--yaml-cfg=")]
    files += [after for word, after in itertools.pairwise(argv) if word == "--yaml-cfg"]
    words = [word for file in files if file for word in _flags_of(Path(file))]
    own, others = ({word.partition("=")[0] for word in each if word.startswith("--")} for each in (words, argv))
    return [*words, *argv], frozenset(own - others)


def _flags_of(path: Path) -> list[str]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: no configuration, which is a mapping of settings")
    # One without sections has the keys of a model file as well.
    if not FILE_KINDS["a model file"] <= content.keys() and (wrong := wrong_kind(_SECTIONS, content)):
        raise ConfigError(f"{path}: {wrong}")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        section = value if key in _SECTIONS and isinstance(value, dict) else {key: value}
        if repeated := settings.keys() & section.keys():
            raise ConfigError(f"{path}: {min(repeated)} stands there twice; remove one")
        settings |= section
    if settings.get("activation_func") == "swiglu":
        settings.pop("gated_linear_unit", None)
    return [word for key, value in settings.items() for word in _words(path, str(key), value)]


def _words(path: Path, key: str, value: Any) -> list[str]:
    if value in (None, "", []) or (key in _ASKS_FOR_NOTHING and value == _ASKS_FOR_NOTHING[key]):
        return []
    if isinstance(value, dict):
        raise ConfigError(f"{path}: {key}: sections are {' and '.join(_SECTIONS)}; write its settings one level up")
    if key == "activation_func":
        if value not in _ACTIVATIONS:
            raise ConfigError(f"{path}: activation_func {value!r} is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]
    flag = f"--{_RENAMED.get(key, key).replace('_', '-')}"
    if key in _ASKS_FOR_NOTHING and flag not in _known():
        raise ConfigError(f"{path}: {key} is {value}, must be {_ASKS_FOR_NOTHING[key]}: there is nothing else here")
    if isinstance(value, bool):
        return _switch(flag, on=value)
    if asks_for_nothing(flag, [value]):
        return []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [] if any(each.name == flag and each.default == value for each in FLAGS) else [f"{flag}={value}"]


def _switch(flag: str, *, on: bool) -> list[str]:
    if flag in _known():
        off = next((each.off for each in FLAGS if each.name == flag), None)
        return [flag] if on else [off] if off is not None else []
    for negative in (flag.replace("--", "--no-", 1), flag.replace("--", "--disable-", 1)):
        if negative in _known():
            return [] if on else [negative]
    # Who reads the flags tells that there is none.
    return [flag]


def _known() -> frozenset[str]:
    return frozenset([*(name for flag in FLAGS for name in flag.names), *WITHOUT_EFFECT, *UNSUPPORTED_FLAGS])
