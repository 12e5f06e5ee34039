"""What an agent holds to, whatever order news come in: an answer is a promise, and a job has one token."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.elastic.agent import Agent
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.ends import End, EndError
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.exhaustion import Exhaustion
from hetero.elastic.job_store import JobState
from hetero.elastic.leader import Leader
from hetero.elastic.leadership import LeaderSettings
from hetero.elastic.records import Epoch, JobSettings, NodeReport, UploadSchedule
from hetero.elastic.stragglers import StragglerSettings
from hetero.errors import ConfigError
from tests.helpers.elastic_epochs import epoch_of, node_info

NODE = node_info("a")


class Told:
    """An agent of node ``a`` that has joined, with ranks that are only noted; nothing of it is connected."""

    def __init__(self, folder: Path) -> None:
        options = AgentOptions(
            job="job",
            etcd=EtcdAddress(urls=("http://127.0.0.1:9",)),
            lease_s=2,
            wait_for_etcd_s=0.0,
            name="a",
            node_type="box",
            host="127.0.0.1",
            port=0,
            failure_domain="a",
            folder=folder / "copies",
            logs=folder,
            settings=JobSettings(program="pretrain_gpt.py", flags=(), versions={}),
            leave_within_s=1.0,
        )
        self.shown: list[str] = []
        self.started: list[int] = []
        self.reports: list[NodeReport] = []
        self.agent = Agent(options, show=self.shown.append)
        self.agent._node = NODE
        self.agent._watch.start = self._start  # type: ignore[method-assign]
        self.agent._watch.end = self._end  # type: ignore[method-assign]
        self.agent._membership.report = self.reports.append  # type: ignore[method-assign]

    def _start(self, epoch: Epoch, *, token: str, uploads: UploadSchedule | None) -> None:
        self.started.append(epoch.number)
        self.agent._ranks.epoch = epoch.number
        self.agent._ranks.running = {0: SimpleNamespace(terminate=lambda: None)}  # type: ignore[dict-item]

    async def _end(self, reason: str) -> None:
        self.agent._ranks.running = {}

    async def hears(self, state: JobState) -> int:
        """What it does then; and which epoch it tells the leader to be over here, which the leader asks it after."""
        assert state.epoch is not None
        await self.agent._follow(state.epoch, state)
        self.agent._tell()
        return self.reports[-1].ended


def epoch(number: int) -> Epoch:
    return epoch_of([NODE], number=number)


def test_ranks_run_until_their_epoch_is_over_and_only_then_the_leader_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        told = Told(tmp_path)
        assert await told.hears(JobState(epoch=epoch(1))) == 0
        assert await told.hears(JobState(epoch=epoch(1))) == 0
        assert await told.hears(JobState(epoch=epoch(1), broken="node b is gone")) == 1
        assert told.started == [1]

    asyncio.run(story())


def test_who_has_answered_does_not_go_back(tmp_path: Path) -> None:
    """Its inventory decides on the next epoch: no older news, read before the end, may start ranks that copy more."""

    async def story() -> None:
        told = Told(tmp_path)
        await told.hears(JobState(epoch=epoch(1)))
        await told.hears(JobState(epoch=epoch(1), broken="node b is gone"))
        assert await told.hears(JobState(epoch=epoch(1))) == 1
        assert (told.started, told.agent._ranks.running) == ([1], {})
        assert await told.hears(JobState(epoch=epoch(2))) == 1
        assert told.started == [1, 2]

    asyncio.run(story())


def test_an_epoch_that_was_over_before_this_node_heard_of_it_is_never_begun(tmp_path: Path) -> None:
    async def story() -> None:
        told = Told(tmp_path)
        assert await told.hears(JobState(epoch=epoch(3), broken="a rank of node b failed")) == 3
        assert await told.hears(JobState(epoch=epoch(3))) == 3
        assert told.started == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("incarnation", "ended", "is_asked"),
    [(NODE.incarnation, 4, True), (NODE.incarnation, 3, False), ("the one before", 4, False)],
)
def test_a_leader_asks_only_who_has_ended_its_ranks(incarnation: str, ended: int, is_asked: bool) -> None:
    asked: list[bool] = []

    class Asking(Leader):
        async def _ask(self, node: Any, *, wants_inventory: bool) -> None:
            asked.append(wants_inventory)

    async def story() -> None:
        tools = SimpleNamespace(
            settings=LeaderSettings(),
            publisher=None,
            problem=None,
            stragglers=StragglerSettings(),
            exhaustion=Exhaustion(print),
            wake=lambda: None,
            show=print,
            forget="",
        )
        leader = Asking(NODE, tools)  # type: ignore[arg-type]
        leader._notes.number = 4
        report = NodeReport(node="a", incarnation=incarnation, ended=ended, ranks=())
        leader._ask_nodes(JobState(epoch=epoch(4), nodes={"a": NODE}, reports={"a": report}))
        await asyncio.gather(*leader._tasks.values())

    asyncio.run(story())
    assert asked == [is_asked]


@pytest.mark.parametrize("token", [None, "another"])
def test_a_job_whose_token_is_lost_ends_here(token: str | None, tmp_path: Path) -> None:
    async def story() -> None:
        told = Told(tmp_path)
        entry = told.agent._entry
        entry._token = "ours"
        entry.check_job(JobState(token="ours"))
        with pytest.raises(EndError, match=r"the token of job job any more: .*; start all agents again") as caught:
            entry.check_job(JobState(token=token))
        assert caught.value.kind is End.TOKEN_LOST

    asyncio.run(story())


def test_an_agent_says_that_its_ranks_are_spawned(tmp_path: Path) -> None:
    async def story() -> None:
        told = Told(tmp_path)
        agent = told.agent
        agent._fork_server.fallback = "an import has initialised CUDA"
        agent._fork_server.warm_up = lambda: None  # type: ignore[method-assign]
        said = asyncio.get_running_loop().create_future()
        said.set_result((1, "the end of the story"))
        agent._ranks.run_alone = lambda *_, **__: said  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="the end of the story"):
            await agent._warm_up()
        (line,) = told.shown
        assert "spawned and not forked, each with seconds of imports: an import has initialised CUDA" in line

    asyncio.run(story())
