#!/usr/bin/env python3
"""Convert weights between this project's checkpoints, Hugging Face folders and megatron-core's torch_dist.

    python tools/convert_checkpoint.py --from hf --to hetero --input Llama-3-8B --output checkpoints/llama
    python tools/convert_checkpoint.py --from hetero --to hf --input checkpoints/run --output exported
    python tools/convert_checkpoint.py --from megatron --to hetero --model model.yaml --input iter_0001000 --output out

Weights only: optimizer state stays behind. Tensors pass one at a time, a file at most in memory, so that the model
may be larger than memory. Nothing that a file says is executed. Formats are described in docs/checkpoints.md.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hetero.extras import exit_without

# Before torch is imported by anyone.
exit_without("train", program="convert_checkpoint.py")

import torch

from hetero.checkpoint.interchange.convert import Conversion, WeightFormat, convert
from hetero.checkpoint.interchange.families import ModelType
from hetero.command_line import Parser, UsageError
from hetero.errors import HeteroError
from hetero.runtime.dtypes import PRECISIONS
from hetero.spec.model import VOCABULARY_DIVISOR
from hetero.spec.parameters import parameters

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if it succeeded, 2 for wrong input."""
    try:
        args = _parser().parse_args(argv)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    conversion = Conversion(
        source_format=args.source_format,
        target_format=args.target_format,
        source=args.input,
        target=args.output,
        step=args.step,
        model=args.model,
        divisible_by=args.make_vocab_size_divisible_by,
        dtype=_DTYPES[args.dtype] if args.dtype else None,
        model_type=args.model_type,
        max_shard_bytes=args.max_shard_size,
    )
    try:
        source = convert(conversion)
    except HeteroError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    count = sum(parameter.numel for parameter in parameters(source.model))
    dtype = str(conversion.dtype or source.dtype).removeprefix("torch.")
    print(f"{conversion.target}: {count:,} weights of {source.model.num_layers} layers in {dtype}, step {source.step}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source_format", choices=get_args(WeightFormat), required=True)
    parser.add_argument("--to", dest="target_format", choices=get_args(WeightFormat), required=True)
    parser.add_argument("--input", type=Path, required=True, help="folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not hold anything yet")
    parser.add_argument("--step", type=int, help="with --from hetero: which checkpoint (default: the newest)")
    parser.add_argument(
        "--model", type=Path, help="with --from megatron: its model, a model.yaml or a Hugging Face config.json"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights written (default: as they are)")
    parser.add_argument("--model-type", choices=get_args(ModelType), help="with --to hf (default: the likeliest)")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=_divisor,
        help=f"pad the vocabulary of a Hugging Face model to a multiple of this (default: {VOCABULARY_DIVISOR})",
    )
    parser.add_argument(
        "--max-shard-size", type=_size_bytes, default="5GB", help="of one file of tensors (default: %(default)s)"
    )
    return parser


def _divisor(text: str) -> int:
    # Padding is allocated, and no file has to be as large.
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 2**16):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 to {2**16}")
    return int(text)


def _size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KB|MB|GB)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
