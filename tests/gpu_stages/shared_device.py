"""Lets two ranks on one device exchange messages, and prints how long they take.

    python -m tests.gpu_stages.shared_device [--device cpu]

From NCCL 2.30 on ranks may share a device. Their times are those of two processes that take turns on it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.nccl_library import loaded_nccl_version
from hetero.distributed.process_groups import create_group
from tests.gpu_stages.target import add_target_options, target_of
from tests.helpers.gpu_ranks import run_on, this_device

NUMEL = 1 << 20
NUM_REPETITIONS = 5
LIMIT_S = 50


def exchange(rank: int, device_name: str) -> dict[str, float]:
    """Return the milliseconds of an exchange by its name.

    Raises:
        AssertionError: a message brought the wrong numbers.
    """
    device = this_device(device_name)
    group = create_group([0, 1], backend="gloo" if device_name == "cpu" else "nccl")
    values = torch.ones(NUMEL, device=device)
    message = torch.full((NUMEL,), float(rank), device=device)
    gathered = torch.empty(2 * NUMEL, device=device)

    def reduce() -> None:
        dist.all_reduce(values.fill_(1.0), group=group)

    def send_round() -> None:
        for sender in (0, 1):
            operation = dist.isend if rank == sender else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(operation, message, 1 - rank, group)]):
                work.wait()

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, message, group=group)

    found = {"first all-reduce": _milliseconds(reduce, device, 1)}
    found["all-reduce"] = _milliseconds(reduce, device, NUM_REPETITIONS)
    assert values[0].item() == 2, "an all-reduce of two ones"
    gather()
    assert (gathered[0].item(), gathered[-1].item()) == (0, 1), "an all-gather of ranks"
    found["all-gather"] = _milliseconds(gather, device, NUM_REPETITIONS)
    found["round trip"] = _milliseconds(send_round, device, NUM_REPETITIONS)
    assert message[0].item() == 0, "rank 0's message"
    return found


def _milliseconds(operation: Callable[[], None], device: torch.device, num_repetitions: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_repetitions):
        operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / num_repetitions


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if the ranks cannot share the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    target = target_of(parser.parse_args(argv))
    try:
        found, _ = run_on(target.device, exchange, 2, target.device, timeout_s=LIMIT_S)
    except pytest.skip.Exception as error:
        print(f"**{error}**")
        return 1
    library = "gloo" if target.device == "cpu" else f"NCCL {loaded_nccl_version()}"
    print(f"{library}, 2 ranks on one device, 4 MiB\n")
    print("| | ms |\n|---|--:|")
    for name, milliseconds in found.items():
        print(f"| {name} | {milliseconds:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
