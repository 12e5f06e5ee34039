"""A legal command line of ``pretrain_gpt.py``, to which tests add flags and from which they take some."""

from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.config import PretrainConfig

BASE = {
    "--num-layers": "4",
    "--hidden-size": "48",
    "--num-attention-heads": "6",
    "--max-position-embeddings": "64",
    "--seq-length": "32",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--mock-data": None,
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--lr": "0.01",
    "--train-iters": "100",
    "--distributed-backend": "gloo",
}


def command(*parts: str, without: str = "") -> list[str]:
    """The words of a legal command line: ``BASE`` less ``without``, then ``parts``."""
    kept = {name: value for name, value in BASE.items() if name not in without.split()}
    words = [word for flag in kept.items() for word in flag if word is not None]
    return words + [word for part in parts for word in part.split()]


def parse(*parts: str, without: str = "") -> PretrainConfig:
    return parse_args(command(*parts, without=without))


MOE = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5"
ROPE = "--position-embedding-type rope"
SCALED = f"{ROPE} --use-rope-scaling"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 10"
GROWING_DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
