"""Flags of Megatron-LM's ``tools/preprocess_data.py`` that ours accepts without effect, or refuses with what to do.

A flag is accepted if leaving it out writes the same documents. The names are those of Megatron-LM's releases with
megatron-core 0.11 to 0.19, and older ones that scripts still use.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron.pretrain.cli.flag_words import cut_by_flag, surplus_value
from megatron.pretrain.cli.unsupported import ASKS_FOR_NOTHING, UNSUPPORTED_FLAGS, asks_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT, WithoutEffect, without_effect

_IGNORED_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "--workers share each file, and documents are written in its order, as --keep-sequential-samples asks for",
        "--partitions=N --keep-sequential-samples --chunk-size=N",
    ),
    ("progress is shown as time passes", "--log-interval=N"),
    (
        "training pads the vocabulary; data has the tokenizer's ids",
        "--make-vocab-size-divisible-by=N --padded-vocab-size=N --no-pad-vocab-size --disable-pad-vocab-size",
    ),
)

_REFUSED_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "sentences are for BERT and T5, only decoder-only GPT models are trained here: leave it out",
        "--split-sentences --keep-newlines --lang",
    ),
    (
        "no trials are made: leave it out; --workers is all cores by default, and the last line has documents/s",
        "--find-optimal-num-workers --workers-to-check --max-documents --performance-dir",
    ),
    ("a document without text is left out and counted: leave it out", "--keep-empty"),
    ("use --vocab-file", "--vocab"),
)

_OF_TOKENIZERS = (
    "--chat-template",
    "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    "--legacy-tokenizer",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
    "--null-tokenizer-pad-id",
    "--tiktoken-num-special-tokens",
    "--tiktoken-pattern",
    "--tiktoken-special-tokens",
    "--tokenizer-hf-no-use-fast",
    "--tokenizer-hf-use-fast",
    "--tokenizer-metadata",
    "--tokenizer-sentencepiece-legacy",
    "--tokenizer-special-tokens",
    "--trust-remote-code",
    "--vocab-extra-ids",
)
"""Flags that ``pretrain_gpt.py`` has as well, and treats alike."""

IGNORED_PREPROCESS_FLAGS: Mapping[str, WithoutEffect] = MappingProxyType(
    without_effect(_IGNORED_GROUPS) | {name: WITHOUT_EFFECT[name] for name in _OF_TOKENIZERS if name in WITHOUT_EFFECT}
)
"""Flags that are accepted and have no effect."""

REFUSED_PREPROCESS_FLAGS: Mapping[str, str] = MappingProxyType(
    {flag: advice for advice, flags in _REFUSED_GROUPS for flag in flags.split()}
    | {name: UNSUPPORTED_FLAGS[name] for name in _OF_TOKENIZERS if name in UNSUPPORTED_FLAGS}
)
"""Each refused flag with what to do instead."""


def take_out_megatron_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Take the flags out of a command line that are accepted without effect, and those that are refused.

    Returns:
        The other words; each flag without effect, with the reason; and what is wrong, in the words of an error.
    """
    others: list[str] = []
    notes: dict[str, str] = {}
    problems: list[str] = []
    for words in cut_by_flag(argv):
        if words.name in REFUSED_PREPROCESS_FLAGS and asks_for_nothing(words.name, words.values):
            notes[words.name] = ASKS_FOR_NOTHING
        elif words.name in REFUSED_PREPROCESS_FLAGS:
            problems.append(f"{words.name} is not supported: {REFUSED_PREPROCESS_FLAGS[words.name]}")
        elif (flag := IGNORED_PREPROCESS_FLAGS.get(words.name)) is not None:
            notes[words.name] = flag.reason
            if problem := surplus_value(words, flag.most_values):
                problems.append(problem)
        else:
            others += words.tokens
    return others, notes, problems
