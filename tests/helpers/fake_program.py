"""A program for agents that trains nothing: its ranks meet in every step, make copies that hold nothing, and report.

It does to its agent what ``pretrain_gpt.py`` does, in milliseconds. Rank 0 fails in the step that ``--fail-at`` names,
in the first epochs, as many as ``--failures`` says.
"""

import argparse
import datetime
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

from hetero.checkpoint.manifest import Shard
from hetero.checkpoint.state import CheckpointState
from hetero.cost.runtime_model import LaunchedRuntime
from hetero.elastic.copy_folder import shard_path, slot_folder, write_copy, write_placement
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.records import (
    ASSIGNMENT_VARIABLE,
    DESCRIBE_VARIABLE,
    Copy,
    CopyPlacement,
    RankAssignment,
    RankPhase,
    RankReport,
    Unit,
)
from hetero.serialization import load, save, to_json
from hetero.spec.cluster import ClusterSpec
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import profile

MODEL = gpt2_model(num_layers=4)


def problem(cluster: Path) -> PlanningProblem:
    return PlanningProblem(
        cluster=load(ClusterSpec, cluster),
        model=MODEL,
        seq_length=16,
        precision="fp32",
        global_batch_size=24,
        distributed_optimizer=False,
        splits_backward=False,
        runtime=LaunchedRuntime(),
        profiles=(profile(MODEL, device="cpu", block_s=(0.1, 0.2)),),
        time_limit_s=1.0,
    )


class FakeRank:
    """One rank; a step waits for all ranks in the store, as an all-reduce would."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.assignment = load(RankAssignment, Path(os.environ[ASSIGNMENT_VARIABLE]))
        self.epoch = self.assignment.epoch
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.committed = 0
        self.stopping = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(self.assignment.reports)

    def run(self) -> None:
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=60),
        )
        self._all_come_to("joined")
        self.report("joined")
        self.report("built")
        time.sleep(self.arguments.restore_s)
        step = self.epoch.start.step
        print(f"rank {self.rank} of {self.world_size} goes on from step {step}", flush=True)
        write_placement(Path(self.assignment.folder), self.epoch.number, self._placement(), epoch_id=self.epoch.id)
        signal.signal(signal.SIGTERM, self._stop)
        self.report("restored", step=step)
        if step:
            self._commit(step)
        while step < self.arguments.steps:
            step += 1
            time.sleep(self.arguments.step_s)
            self._fail_if_due(step)
            is_last = self._all_come_to(f"step {step}", stops=self.stopping) or step == self.arguments.steps
            self._commit(step)
            self.report("step", step=step, step_s=self.arguments.step_s)
            if is_last:
                break
        self.report("finished" if step == self.arguments.steps else "stopped", step=step)

    def report(self, phase: RankPhase, *, step: int = 0, step_s: float = 0.0, detail: str = "") -> None:
        said = RankReport(
            epoch=self.epoch.number,
            rank=self.rank,
            phase=phase,
            step=step,
            committed=self.committed,
            step_s=step_s,
            detail=detail,
        )
        self._socket.send(to_json(said).encode())

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _all_come_to(self, point: str, *, stops: bool = False) -> bool:
        """Wait for all; whether any of them is to stop."""
        if stops:
            self._store.add(f"{point} stops", 1)
        self._store.add(point, 1)
        while self._store.add(point, 0) < self.world_size:
            time.sleep(0.002)
        return self._store.add(f"{point} stops", 0) > 0

    def _placement(self) -> CopyPlacement:
        return CopyPlacement(
            units=tuple(
                Unit(
                    name=f"rank_{rank:05d}",
                    owner=rank,
                    keeper=(rank + 1) % self.world_size if self.world_size > 1 else None,
                    held=False,
                    blocks=(f"weights/of_{rank}[0:1]",),
                    num_bytes=4,
                )
                for rank in range(self.world_size)
            )
        )

    def _commit(self, step: int) -> None:
        slot = slot_folder(Path(self.assignment.folder), self.epoch.number, step % 2)
        for unit in self._placement().units:
            if self.rank in (unit.owner, unit.keeper):
                shard_path(slot, unit.name).write_bytes(b"")
                shard = Shard(file=f"{unit.name}.safetensors", size_bytes=0, header_crc32=0, boxes=())
                state = CheckpointState(step=step, model=MODEL, precision="fp32")
                write_copy(
                    slot,
                    Copy(epoch=self.epoch.number, step=step, unit=unit.name, shard=shard, tensors={}, state=state),
                )
        self._all_come_to(f"copied {step}")
        self.committed = step

    def _fail_if_due(self, step: int) -> None:
        if step == self.arguments.fail_at and self.rank == 0 and self.epoch.number <= self.arguments.failures:
            if self.arguments.bad_copy:
                node = self.assignment.node
                self.report("bad_copy", detail=f"{node}/{self.epoch.number}/{step - 1}/rank_00000")
            sys.exit(self.arguments.exit_code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hetero-cluster", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--restore-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--exit-code", type=int, default=1)
    parser.add_argument("--bad-copy", action="store_true")
    arguments = parser.parse_args()
    if (path := os.environ.get(DESCRIBE_VARIABLE)) is not None:
        save(problem(arguments.hetero_cluster), Path(path))
    else:
        FakeRank(arguments).run()


if __name__ == "__main__":
    main()
