"""The flags of Megatron-LM's own examples, and what makes the models small enough for a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from hetero.errors import ConfigError
from megatron.pretrain.cli.arguments import parse_args
from tests.helpers.sources import ROOT


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Holds what a script of Megatron-LM gives ``pretrain_gpt.py``, and where the script stands.

    title: in docs/megatron_flags.md.
    path, commit: of the copy that was read, in https://github.com/NVIDIA/Megatron-LM.
    """

    title: str
    path: str
    commit: str
    flags: str

    @property
    def words(self) -> list[str]:
        return self.flags.split()

    @property
    def names(self) -> list[str]:
        return [word for word in self.words if word.startswith("--")]

    def messages(self) -> list[str]:
        """Return what our parser says against it, a line for each thing to change."""
        try:
            parse_args([*self.words, "--distributed-backend", "gloo"])
        except ConfigError as error:
            return str(error).splitlines()
        return []


EXAMPLES: Mapping[str, Example] = {
    name: Example(**facts)
    for name, facts in yaml.safe_load((ROOT / "tests/data/megatron_examples.yaml").read_text(encoding="utf-8")).items()
}
"""The examples of tests/data/megatron_examples.yaml by name."""


def with_values(words: list[str], changes: Mapping[str, str | None]) -> list[str]:
    """``words`` with other values of some flags, or without them where the value is ``None``; all must be there."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[next(reversed(flags))].append(word)
    assert set(changes) <= set(flags), set(changes) - set(flags)
    flags |= {name: value.split() for name, value in changes.items() if value is not None}
    kept = {name: values for name, values in flags.items() if name not in changes or changes[name] is not None}
    return [word for name, values in kept.items() for word in (name, *values)]
