"""Nodes of an elastic run that are folders and servers of one process, and what their ranks do in one epoch."""

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero.distributed.process_groups import create_groups
from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.records import (
    Epoch,
    EpochNode,
    HeldStep,
    Inventory,
    NodeInfo,
    RankAssignment,
    RankReport,
    RestorePoint,
    UploadSchedule,
)
from hetero.elastic.recovery import BadCopy, Restore, choose_step, lineage_of
from hetero.plan.ir import Plan
from hetero.runtime.session import TrainingSession
from hetero.serialization import from_json
from megatron.pretrain.checkpointing import RunStart
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.elastic import ElasticRank
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import build_trainer
from tests.helpers.poisoned_memory import assert_filled, built
from tests.helpers.sessions import Session, state_of, weights_of
from tests.helpers.training import data_of

JOB, TOKEN = "job", "a token of this test"


class DiedError(Exception):
    """Stands for a SIGKILL: what is under way is left as it is."""


class Nodes:
    """Folders with copies, each with its server, on loopback; and the socket of the agents."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: dict[str, CopyServer] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.info: dict[str, NodeInfo] = {}
        self.reports_at = str(folder / "reports")
        self._socket.bind(self.reports_at)
        self._socket.settimeout(0.1)
        self._reports: list[RankReport] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def folder(self, name: str) -> Path:
        """Of the copies of a node."""
        return self._folder / name

    def add(self, name: str) -> None:
        """A node comes, with nothing."""
        self.folder(name).mkdir()
        server = CopyServer(self.folder(name), job=JOB, node=name, token=TOKEN)
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1"), self._loop).result()
        self._servers[name] = server
        self.info[name] = NodeInfo(
            name=name,
            incarnation=name,
            node_type="cpu",
            num_ranks=1,
            host="127.0.0.1",
            port=port,
            failure_domain=name,
            settings="",
        )

    def lose(self, name: str) -> None:
        """A node is gone with all that it had."""
        self.stop_serving(name)
        del self.info[name]
        shutil.rmtree(self.folder(name))

    def stop_serving(self, name: str) -> None:
        """A node cannot be reached any more."""
        asyncio.run_coroutine_threadsafe(self._servers.pop(name).stop(), self._loop).result()

    def inventories(self) -> list[Inventory]:
        """Of all nodes that are there, asked of their servers."""
        found = []
        for node in self.info.values():
            client = CopyClient(node, job=JOB, token=TOKEN)
            found.append(client.inventory())
            client.close()
        return found

    def reports(self) -> list[RankReport]:
        """What ranks have reported since the last question."""
        found, self._reports = self._reports, []
        return found

    def _read(self) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                text = self._socket.recv(65536).decode()
                self._reports.append(from_json(RankReport, text, source="report"))

    def close(self) -> None:
        for name in list(self._servers):
            self.stop_serving(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._reader.join()
        self._loop.close()
        self._socket.close()


@contextmanager
def nodes(folder: Path, *names: str) -> Iterator[Nodes]:
    """Nodes of these names, until the block ends."""
    made = Nodes(folder)
    try:
        for name in names:
            made.add(name)
        yield made
    finally:
        made.close()


@dataclass
class Run:
    """An elastic run, epoch after epoch.

    object_store: URL, of which ``stored`` is what a leader knows.
    upload_every: steps.
    """

    nodes: Nodes
    lineage: dict[int, RestorePoint] = field(default_factory=dict)
    committed: int = 0
    object_store: str | None = None
    upload_every: int | None = None
    stored: tuple[HeldStep, ...] = ()

    def next_epoch(
        self, plan: Plan, ranks_of: Mapping[str, Sequence[int]], bad: frozenset[BadCopy] = frozenset()
    ) -> Epoch:
        """The epoch that a leader makes of what the nodes have."""
        found = choose_step(
            self.nodes.inventories(), lineage=self.lineage, stored=self.stored, bad=bad, committed=self.committed
        )
        assert found is not None, "no step is whole"
        return self.epoch_from(found, plan, ranks_of)

    def epoch_from(self, found: Restore, plan: Plan, ranks_of: Mapping[str, Sequence[int]]) -> Epoch:
        number = max(self.lineage, default=0) + 1
        self.lineage = lineage_of(number, found.start, self.lineage)
        return Epoch(
            number=number,
            plan=plan,
            nodes=tuple(EpochNode(node=self.nodes.info[name], ranks=tuple(each)) for name, each in ranks_of.items()),
            start=found.start,
            ids={each: f"id{each}" for each in range(1, number + 1)},
            lineage=self.lineage,
            sources=found.sources,
            rendezvous_host="127.0.0.1",
            rendezvous_port=1,
            reason="a test",
            others=tuple(self.nodes.info[name] for name in sorted(found.holders - ranks_of.keys())),
        )

    def assignments(self, epoch: Epoch) -> list[RankAssignment]:
        """By rank."""
        by_rank = {
            rank: RankAssignment(
                job=JOB,
                epoch=epoch,
                node=each.node.name,
                token=TOKEN,
                folder=str(self.nodes.folder(each.node.name)),
                reports=self.nodes.reports_at,
                object_store=self.object_store,
                uploads=None if self.upload_every is None else UploadSchedule(every_steps=self.upload_every),
            )
            for each in epoch.nodes
            for rank in each.ranks
        }
        return [by_rank[rank] for rank in range(epoch.plan.world_size)]


Watch = Callable[[int, int, ElasticRank], None]
"""Gets rank, step and what elastic training keeps of the rank."""


def wait_for_copy(rank: int, step: int, elastic: ElasticRank) -> None:
    """Steps take as long as copies: a step commits the copy of the one before."""
    assert elastic._copies is not None
    if (in_hand := elastic._copies._in_hand) is not None:
        assert in_hand.ended.wait(30)


FIRST_START = RunStart(generation_config={"bos_token_id": 3, "eos_token_id": [7, 8]})
"""Of the first epoch of a run; copies have to hand what it says of tokens on to the later ones."""


def elastic_session(
    rank: int,
    assignments: Sequence[RankAssignment],
    argv: list[str],
    end_step: int,
    dies: bool = False,
    watch: Watch | None = None,
) -> Session:
    """Run on every rank of an epoch: steps up to ``end_step``, which is committed unless all die there.

    watch: is called before each step; without it, each waits for the copy of the step before.
    """
    config = parse_args(argv)
    assignment = assignments[rank]
    elastic, cpu = ElasticRank(assignment, config, rank=rank), torch.device("cpu")
    context = create_groups(assignment.epoch.plan, device=cpu, timing=elastic.timing(cpu))
    draws = not elastic.goes_on_from_copies
    trainer = built(lambda: build_trainer(config, context, draws_weights=draws), draws_weights=draws)
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    start = FIRST_START
    if elastic.goes_on_from_copies:
        start = elastic.restore(context, trainer, scheduler, settings=FIRST_START.settings)
    assert_filled(trainer)
    assert start.generation_config == FIRST_START.generation_config
    start_step = start.step
    training = TrainingSession(
        context,
        trainer,
        data=data_of(context, first_step=start_step),
        schedule=scheduler,
        start_step=start_step,
        check_for_nan=config.run.check_for_nan,
    )
    seen = Session(start_step, first_weights=weights_of(training))
    try:
        with elastic.copying(context, trainer, scheduler, start=start):
            for step in range(start_step + 1, end_step + 1):
                (watch or wait_for_copy)(rank, step, elastic)
                seen.results.append(training.step())
                elastic.after_step(step, is_last=step == end_step and not dies)
            if dies:
                raise DiedError
    except DiedError:
        pass
    seen.next_lr = training.learning_rate
    seen.loss_scale = trainer.scaler.scale if trainer.scaler is not None else 1.0
    seen.weights = weights_of(training)
    seen.state = state_of(trainer)
    return seen
