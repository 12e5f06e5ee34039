#!/usr/bin/env python3
"""Convert weights between this project's checkpoints, Hugging Face folders and megatron-core's torch_dist.

    python tools/convert_checkpoint.py --from hf --to hetero --input Llama-3-8B --output checkpoints/llama
    python tools/convert_checkpoint.py --from hetero --to hf --input checkpoints/run --output exported
    python tools/convert_checkpoint.py --from megatron --to hetero --model model.yaml --input iter_0001000 --output out

Weights only: optimizer state stays behind. Tensors pass one at a time, a file at most in memory, so that the model
may be larger than memory. Nothing that a file says is executed. Formats are described in docs/checkpoints.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

# The code of this checkout, whatever is installed.
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.pretrain.start_check import exit_if_unusable

# Before torch is imported by anyone.
exit_if_unusable("convert_checkpoint.py")

from hetero.checkpoint.interchange.formats import ModelType, WeightFormat
from hetero.checkpoint.manifest import FloatType
from hetero.command_line import Parser, UsageError
from hetero.errors import ConfigError, HeteroError
from hetero.printable import printable_output
from hetero.spec.hugging_face.generation import TOKEN_IDS, GenerationConfig
from hetero.spec.model import MAX_VOCABULARY_DIVISOR, VOCABULARY_DIVISOR
from hetero.spec.parameters import parameters
from megatron.pretrain.cli.value_types import TOKENIZER_FILES
from megatron.pretrain.tokenizer_files import TokenizerFiles, tokenizer_files

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@printable_output()
def main(argv: Sequence[str]) -> int:
    """Exit code 0 if it succeeded, 2 for wrong input."""
    try:
        args = _parser().parse_args(argv)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _check(args)
        tokenizer = _tokenizer(args)
        # What is wrong with the command line was told before this import, which takes seconds.
        import torch

        from hetero.checkpoint.interchange.convert import Conversion, convert

        conversion = Conversion(
            source_format=args.source_format,
            target_format=args.target_format,
            source=args.input,
            target=args.output,
            step=args.step,
            model=args.model,
            divisible_by=args.make_vocab_size_divisible_by,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            model_type=args.model_type,
            max_shard_bytes=args.max_shard_size,
            other_files=tokenizer.contents if tokenizer is not None else {},
            least_vocab_size=tokenizer.vocab_size if tokenizer is not None else 0,
            generation_config=tokenizer.generation_config if tokenizer is not None else {},
            generation_defaults=tokenizer.generation_defaults if tokenizer is not None else {},
        )
        with torch.no_grad():
            converted = convert(conversion)
    except HeteroError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    source = converted.weights
    for note in converted.notes:
        print(note)
    count = sum(parameter.numel for parameter in parameters(source.model))
    dtype = str(conversion.dtype or source.dtype).removeprefix("torch.")
    print(f"{conversion.target}: {count:,} weights of {source.model.num_layers} layers in {dtype}, step {source.step}")
    if tokenizer is not None:
        print(f"{conversion.target}: with the tokenizer's {', '.join(sorted(tokenizer.contents))}")
    elif conversion.target_format == "hf":
        print(f"{conversion.target}: without a tokenizer; --tokenizer-type and the run's other flags of it add one")
    if conversion.target_format == "hf":
        print(f"{conversion.target}: {_token_ids(converted.generation_config)}")
    return 0


def _token_ids(generation_config: GenerationConfig) -> str:
    """Say which tokens the export names, and what follows if it names no end."""
    ids = ", ".join(f"{key} {json.dumps(generation_config.get(key))}" for key in TOKEN_IDS)
    if generation_config.get("eos_token_id") is not None:
        return ids
    return f"{ids}: no end of a text is known, so that generation runs to its limit; --tokenizer-type names one"


def _check(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: flags do not go together, or there is nothing to read.
    """
    if not args.input.is_dir():
        raise ConfigError(f"--input {args.input}: no such folder (looked in {Path.cwd()}); give that of a checkpoint")
    given = {
        "--tokenizer-type": args.tokenizer_type,
        "--tokenizer-model": args.tokenizer_model,
        "--vocab-file": args.vocab_file,
        "--merge-file": args.merge_file,
    }
    for flag, value in given.items():
        if value is not None and args.target_format != "hf":
            raise ConfigError(f"{flag} {value} has no effect with --to {args.target_format}: leave it out")
        if value is not None and args.tokenizer_type is None:
            raise ConfigError(f"{flag} {value} needs --tokenizer-type: add the one that the run had")


def _tokenizer(args: argparse.Namespace) -> TokenizerFiles | None:
    if args.tokenizer_type is None:
        return None
    return tokenizer_files(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="convert_checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source_format", choices=get_args(WeightFormat), required=True)
    parser.add_argument("--to", dest="target_format", choices=get_args(WeightFormat), required=True)
    parser.add_argument("--input", type=Path, required=True, help="folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not hold anything yet")
    parser.add_argument("--step", type=int, help="with --from hetero: which checkpoint (default: the newest)")
    parser.add_argument(
        "--model", type=Path, help="with --from megatron: its model, a model.yaml or a Hugging Face config.json"
    )
    parser.add_argument("--dtype", choices=get_args(FloatType), help="of the weights written (default: as they are)")
    parser.add_argument("--model-type", choices=get_args(ModelType), help="with --to hf (default: the likeliest)")
    parser.add_argument(
        "--tokenizer-type", choices=list(TOKENIZER_FILES), help="with --to hf: as the run had it; adds its files"
    )
    parser.add_argument(
        "--tokenizer-model", help="a tokenizer.json or a SentencePiece model, or the folder that has it"
    )
    parser.add_argument("--vocab-file", type=Path, help="GPT2BPETokenizer: its vocab.json")
    parser.add_argument("--merge-file", type=Path, help="GPT2BPETokenizer: its merges.txt")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=_divisor,
        help="with --from hf and --from megatron: pad the vocabulary to a multiple of this, whatever the source has "
        f"(default: {VOCABULARY_DIVISOR}, or as a model.yaml says)",
    )
    parser.add_argument(
        "--max-shard-size", type=_size_bytes, default="5GB", help="of one file of tensors (default: %(default)s)"
    )
    return parser


def _divisor(text: str) -> int:
    # Padding is allocated, and no file has to be as large.
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MAX_VOCABULARY_DIVISOR):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 to {MAX_VOCABULARY_DIVISOR}")
    return int(text)


def _size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KB|MB|GB)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
