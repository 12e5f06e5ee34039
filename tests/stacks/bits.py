"""Prints a digest of each of the 65 trainings: its losses, gradient norms and final weights, bit by bit.

    python -m tests.stacks.bits                        all of them
    python -m tests.stacks.bits --only moe fp64        those whose names have all of these words

Two stacks whose lines are equal train the same bits. :mod:`tests.stacks.trainings` says which trainings there are.
"""

import argparse
import hashlib
from collections.abc import Mapping, Sequence

from hetero.runtime import cpu_backend

cpu_backend.install()

from tests.helpers.early_fork_server import fork_server_early  # noqa: E402
from tests.helpers.rank_pool import fork_server  # noqa: E402
from tests.helpers.ranks import POOL  # noqa: E402
from tests.helpers.training import Trace, Training, trained  # noqa: E402
from tests.stacks.results import DIGITS, report_lines  # noqa: E402
from tests.stacks.trainings import STEPS, trainings  # noqa: E402


def digests(chosen: Mapping[str, Training]) -> dict[str, str]:
    """Train all of ``chosen`` and return the digest of each by name."""
    by_size: dict[int, dict[str, Training]] = {}
    for name, training in chosen.items():
        by_size.setdefault(training.plan.world_size, {})[name] = training
    found: dict[str, str] = {}
    for group in by_size.values():
        found |= {name: digest(traces) for name, traces in trained(group, STEPS).items()}
    return {name: found[name] for name in chosen}


def digest(traces: Sequence[Trace | None]) -> str:
    """Return the digest of what the ranks saw, in the order of ranks and parameter names."""
    whole = hashlib.sha256()
    for trace in traces:
        assert trace is not None, "no rank of these plans is idle"
        whole.update(repr([value.hex() for value in (*trace.losses, *trace.grad_norms)]).encode())
        for name, weight in sorted(trace.weights[-1].items()):
            # As float64, which holds every value of the other types.
            whole.update(name.encode() + weight.tobytes())
    return whole.hexdigest()[:DIGITS]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.stacks.bits", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="words of the trainings' names")
    words = set(parser.parse_args(argv).only)
    chosen = {name: training for name, training in trainings().items() if words <= set(name.split())}
    if not chosen:
        parser.error(f"no training has all of these words in its name: {', '.join(sorted(words))}")
    fork_server()
    # The ranks' server is a fork of this process, so that torch and megatron-core are imported once.
    fork_server_early()
    try:
        print(report_lines(digests(chosen)))
    finally:
        POOL.close()


if __name__ == "__main__":
    main()
