"""Tells a file that is in the place of another one, such as a cluster file that is given as a plan."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

FILE_KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "a plan (of hetero plan --out)": frozenset({"replicas"}),
        "a cluster file": frozenset({"node_types"}),
        "a model file": frozenset({"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"}),
        "a Hugging Face configuration": frozenset({"model_type"}),
        "a Hugging Face tokenizer": frozenset({"added_tokens"}),
        "a profile (of hetero profile run)": frozenset({"shape", "arithmetic", "times"}),
        "a host's profile (of hetero profile host)": frozenset({"source", "memory_gib"}),
        "a YAML configuration of Megatron-LM": frozenset({"language_model", "model_parallel"}),
        "a sweep file": frozenset({"grids"}),
        "a sweep's outcome (sweep.json)": frozenset({"mode", "rows"}),
        "measured links": frozenset({"nodes", "pairs"}),
        "a prediction (of --json)": frozenset({"step_s", "memory"}),
    }
)
"""By kind of file, the keys by which it is known; no other kind has all of them at its top level."""


def wrong_kind(fields: Collection[str], data: Any) -> str:
    """What ``data`` is, if it is a file of another kind than the one with ``fields`` at its top level; else nothing."""
    if not isinstance(data, dict):
        return ""
    wanted = next((kind for kind, keys in FILE_KINDS.items() if keys <= set(fields)), None)
    found = next((kind for kind, keys in FILE_KINDS.items() if keys <= data.keys()), None)
    if wanted is None or found is None or found == wanted:
        return ""
    shown = " and ".join(map(repr, sorted(FILE_KINDS[found])))
    return f"it is {found}, by its {shown}, where {wanted} belongs; name that file"
