"""The one rule, at every end of an agent: copies are deleted at exit code 0 and at no other; the lease is given up."""

import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.elastic import ends
from hetero.elastic.agent import Agent
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.copy_folder import inventory
from hetero.elastic.ends import AgentEnd, End
from hetero.elastic.etcd import delete_request, put_request
from hetero.elastic.events import read_events
from hetero.elastic.job_store import JobState, JobStore, token_mark
from hetero.elastic.records import Epoch, JobSettings, NodeInfo, Notice, Outcome, RankReport
from hetero.errors import MembershipStoreError, StoreRefusalError
from hetero.serialization import to_json
from tests.helpers.elastic_epochs import epoch_of, node_info
from tests.helpers.etcd import EtcdServer
from tests.helpers.fake_program import problem
from tests.helpers.sources import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]

SETTINGS = JobSettings(program="pretrain_gpt.py", flags=("--lr", "0.1"), versions={})

CLUSTER = """\
node_types:
  - {name: fast, device: cpu, gpus_per_node: 1, count: 2, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}
"""

COMMITTED = 7


class Story:
    """A real agent of node ``a``, in a real etcd, without ranks and without the lead; ``b`` is another node."""

    def __init__(self, etcd: EtcdServer, folder: Path, job: str) -> None:
        self.etcd = etcd
        self.folder = folder
        self.store = JobStore(etcd.address, job)
        self.shown: list[str] = []
        self.options = AgentOptions(
            job=job,
            etcd=etcd.address,
            lease_s=2,
            wait_for_etcd_s=0.6,
            name="a",
            node_type="fast",
            host="127.0.0.1",
            port=0,
            failure_domain="a",
            folder=folder / "copies",
            logs=folder,
            settings=SETTINGS,
            leave_within_s=20.0,
        )
        self.b = node_info("b")
        (folder / "cluster.yaml").write_text(CLUSTER)
        self.agent = Agent(self.options, show=self.shown.append)
        self.warmed_up = asyncio.Event()
        self.life: asyncio.Task[AgentEnd] | None = None

    async def begin(self) -> None:
        """Start the agent; what takes seconds of processes is left out."""
        agent = self.agent

        async def warm_up() -> None:
            agent._problem = problem(self.folder / "cluster.yaml")
            (self.options.folder / "epoch_00000001").mkdir(exist_ok=True)
            self.warmed_up.set()

        async def lead(_: JobState) -> None:
            """Node b leads."""

        agent._fork_server.start = lambda: None  # type: ignore[method-assign]
        agent._warm_up = warm_up  # type: ignore[method-assign]
        agent._lead = lead  # type: ignore[method-assign]
        self.life = asyncio.create_task(agent.run())

    async def begin_with_copies(self, owner: str) -> None:
        """Start the agent where an earlier one has left copies; ``owner`` is what its ``job.json`` says."""
        (self.options.folder / "epoch_00000001").mkdir(parents=True)
        (self.options.folder / "job.json").write_text(owner)
        await self.begin()

    async def join(self) -> None:
        """Start the agent, and wait until its node is in the job, of which a step is committed."""
        await self.begin()
        await self.until(lambda state: "a" in state.nodes and "a" in state.reports)
        self.put("committed", f"{COMMITTED:020d}")
        await self.until(lambda _: self.agent._membership.state.committed == COMMITTED)

    async def until(self, condition: Callable[[JobState], bool]) -> None:
        while not condition(await asyncio.to_thread(self.store.read)):
            assert self.life is None or not self.life.done(), f"it has ended: {self.life.result()}"
            await asyncio.sleep(0.02)

    async def be_joined_by_b(self) -> None:
        """Node ``b`` is there, and its host answers."""
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        self.b = dataclasses.replace(self.b, port=server.sockets[0].getsockname()[1])
        self.put("nodes/b", to_json(self.b))

    def put(self, key: str, value: str) -> None:
        self.store.write([], [put_request(self.store.key(key), value)])

    def delete(self, key: str) -> None:
        self.store.write([], [delete_request(self.store.key(key))])

    def end_job(self, exit_code: int, reason: str) -> None:
        self.put("finished", to_json(Outcome(exit_code=exit_code, reason=reason)))

    def begin_epoch(self, *nodes: NodeInfo, start_step: int = 0) -> Epoch:
        """Begin one; from a step other than 0 it has to load copies, which no node of these stories ever does."""
        epoch = epoch_of(nodes)
        epoch = dataclasses.replace(epoch, start=dataclasses.replace(epoch.start, step=start_step))
        self.put("epoch", to_json(epoch))
        return epoch

    def have_finished(self) -> None:
        """The ranks of this node have finished."""
        self.agent._watch._reports.latest = {0: RankReport(epoch=1, rank=0, phase="finished", committed=COMMITTED)}

    def take_no_writes(self) -> None:
        """Etcd answers reads, and refuses what would change something."""

        def refuse(*_: object) -> None:
            raise StoreRefusalError("etcd refuses: mvcc: database space exceeded")

        self.agent._membership._writer.write = refuse  # type: ignore[assignment]


Told = Callable[[Story], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """An end: what leads to it, and what it has to be."""

    end: End
    exit_code: int
    says: str
    tell: Told
    own_etcd: bool = False


ROWS: dict[str, Row] = {}


def row(end: End, exit_code: int, says: str, *, own_etcd: bool = False) -> Callable[[Told], Told]:
    """Put a story into the table."""

    def put(tell: Told) -> Told:
        ROWS[tell.__name__] = Row(end=end, exit_code=exit_code, says=says, tell=tell, own_etcd=own_etcd)
        return tell

    return put


@row(End.FINISHED, 0, "all ranks have finished")
async def the_job_finishes(story: Story) -> None:
    await story.join()
    story.end_job(0, "all ranks have finished")


@row(End.FINISHED_WITHOUT_ETCD, 0, "all ranks of this node have finished; etcd was not told: ", own_etcd=True)
async def ranks_finish_while_etcd_is_away(story: Story) -> None:
    await story.join()
    story.etcd.stop()
    story.have_finished()


@row(End.LEFT, 0, "node a has left: hetero elastic leave")
async def a_node_leaves_and_the_others_go_on(story: Story) -> None:
    await story.join()
    await story.be_joined_by_b()
    story.begin_epoch(story.b)
    story.put("notices/a", to_json(Notice(node="a", reason="hetero elastic leave")))


@row(End.LEFT_LAST, 1, "node a has left, and no node stays: its agent got SIGTERM")
async def the_last_node_leaves(story: Story) -> None:
    await story.join()
    signal.raise_signal(signal.SIGTERM)


NO_STEP = "no step was committed since this agent started"


@row(End.LEFT_WITHOUT_STEP, 75, NO_STEP)
async def a_node_leaves_while_all_wait_for_more(story: Story) -> None:
    """At once, as there is nothing to hand over: its time of 20 s is not over."""
    await story.begin()
    await story.until(lambda state: "a" in state.nodes)
    await story.be_joined_by_b()
    await story.until(lambda _: "b" in story.agent._membership.state.nodes)
    signal.raise_signal(signal.SIGTERM)
    assert story.life is not None
    assert "has left: its agent got SIGTERM" in (await asyncio.wait_for(story.life, 10)).reason


@row(End.LEFT_WITHOUT_STEP, 75, NO_STEP)
async def the_time_is_over_before_a_step(story: Story) -> None:
    """What an earlier start has committed does not count."""
    story.put("committed", f"{COMMITTED:020d}")
    await story.begin()
    await story.until(lambda state: "a" in state.nodes)
    await story.be_joined_by_b()
    story.begin_epoch(story.b, start_step=COMMITTED)
    story.put("notices/a", to_json(Notice(node="a", reason="cloud", seconds=0.3)))


@row(End.LEFT_WITHOUT_STEP, 75, f"which is saved; {NO_STEP}")
async def all_leave_after_the_step_that_they_loaded(story: Story) -> None:
    await story.begin()
    await story.until(lambda state: "a" in state.nodes)
    await story.be_joined_by_b()
    story.begin_epoch(story.b, start_step=COMMITTED)
    await story.until(lambda _: story.agent._membership.state.epoch is not None)
    signal.raise_signal(signal.SIGTERM)
    await story.until(lambda state: "a" in state.notices)
    reason = "all nodes leave after step 20 of 40, which is saved"
    story.put("finished", to_json(Outcome(exit_code=0, reason=reason, resumes=True)))


@row(End.LEFT_TOO_LATE, 1, "node a: its time was over before the job had gone on without it")
async def the_time_of_a_notice_is_over(story: Story) -> None:
    await story.join()
    await story.be_joined_by_b()
    story.begin_epoch(story.b, start_step=COMMITTED)
    story.put("notices/a", to_json(Notice(node="a", reason="cloud", seconds=0.3)))


@row(End.GAVE_UP, 1, "2 nodes are there, 3 are asked for")
async def the_leader_gives_up(story: Story) -> None:
    await story.join()
    story.end_job(1, "2 nodes are there, 3 are asked for")


@row(End.WRONG_INPUT, 2, "rank 0 on node b: a token id is too large")
async def a_rank_refuses_its_input(story: Story) -> None:
    await story.join()
    story.end_job(2, "rank 0 on node b: a token id is too large")


@row(End.REFUSED, 2, "this agent does not fit to its job: flags: here 0.1, in the job 0.2")
async def the_job_has_other_settings(story: Story) -> None:
    story.put("settings", to_json(dataclasses.replace(SETTINGS, flags=("--lr", "0.2"))))
    story.begin_epoch(story.b)
    await story.begin()


@row(End.REFUSED, 2, "it has files that are no copies of a run")
async def the_folder_of_copies_has_other_files(story: Story) -> None:
    story.options.folder.mkdir()
    (story.options.folder / "thesis.tex").touch()
    await story.begin()


@row(End.REFUSED, 2, "has copies of an earlier job")
async def etcd_has_lost_the_job_that_the_copies_are_of(story: Story) -> None:
    await story.begin_with_copies(f'{{"job": "{story.options.job} {token_mark("before")}"}}')


@row(End.REFUSED, 2, "has copies of job another; go on with that job")
async def the_folder_has_copies_of_a_job_of_another_name(story: Story) -> None:
    await story.begin_with_copies('{"job": "another 0123456789abcdef"}')


@row(End.REFUSED, 2, "has copies of a job that its job.json does not name")
async def the_folder_does_not_say_whose_its_copies_are(story: Story) -> None:
    await story.begin_with_copies("")


@row(End.REFUSED, 2, "node a is in job")
async def another_agent_has_the_place_after_an_eviction(story: Story) -> None:
    await story.join()
    await story.be_joined_by_b()
    story.put("nodes/a", to_json(dataclasses.replace(story.b, name="a")))


@row(End.REFUSED, 2, "this agent does not fit to its job: ")
async def others_open_the_job_again_with_other_settings(story: Story) -> None:
    await story.join()
    story.put("settings", to_json(dataclasses.replace(SETTINGS, flags=("--lr", "0.2"))))


@row(End.REFUSED, 2, "/epoch: not JSON")
async def a_key_that_a_new_agent_needs_cannot_be_read(story: Story) -> None:
    story.put("epoch", "{")
    await story.begin()


@row(End.REFUSED, 2, "/epoch: missing key 'ids'; go on with the version of megatron-hetero that began the job")
async def an_earlier_version_began_the_job(story: Story) -> None:
    epoch = json.loads(to_json(epoch_of([story.b])))
    del epoch["ids"]
    story.put("epoch", json.dumps(epoch))
    await story.begin()


@row(End.JOB_IS_OVER, 2, "is over already: all ranks have finished")
async def an_agent_comes_after_the_end(story: Story) -> None:
    story.end_job(0, "all ranks have finished")
    await story.begin()


@row(End.JOB_BEGINS_AGAIN, 1, "this node stays, and begins it again")
async def a_node_comes_while_all_others_leave(story: Story) -> None:
    await story.join()
    story.begin_epoch(story.b)
    story.put("stop/1/for_good", "yes")
    story.put("finished", to_json(Outcome(exit_code=0, reason="all nodes leave", resumes=True)))


@row(End.JOB_BEGINS_AGAIN, 1, "etcd has forgotten the job")
async def the_job_has_begun_again_while_the_node_was_away(story: Story) -> None:
    await story.join()
    token = story.store.read().token
    assert token is not None
    story.put(f"forgotten/{token_mark(token)}", "1")
    story.put("token", "of another job")


@row(End.FINISHED, 0, "the flags end the run after step 20 of 40")
async def the_flags_end_the_run(story: Story) -> None:
    await story.join()
    story.put(
        "finished",
        to_json(Outcome(exit_code=0, reason="the flags end the run after step 20 of 40, which is saved", resumes=True)),
    )


@row(End.TOKEN_LOST, 2, "etcd does not know the token of job")
async def etcd_loses_the_token(story: Story) -> None:
    await story.join()
    story.delete("token")


@row(End.WENT_BACK, 2, "went back to an earlier state: its revision is 3, and was 9 before")
async def etcd_goes_back(story: Story) -> None:
    await story.join()
    story.agent._membership._check_revision(3, seen=9)


@row(End.WENT_BACK, 2, "went back to an earlier state: its revision is 3, and was 9 before")
async def etcd_goes_back_while_an_evicted_node_joins_again(story: Story) -> None:
    def fail(_: NodeInfo) -> bool:
        raise MembershipStoreError("it went back")

    await story.join()
    story.agent._membership.join = fail  # type: ignore[method-assign]
    story.delete("nodes/a")
    while not any("was evicted" in line for line in story.shown):
        await asyncio.sleep(0.02)
    story.agent._membership._check_revision(3, seen=9)


@row(End.WENT_BACK, 2, "went back to an earlier state: its revision is 3, and was 9 before")
async def etcd_goes_back_in_an_epoch(story: Story) -> None:
    await story.join()
    await story.be_joined_by_b()
    story.begin_epoch(story.b)
    await story.until(lambda _: story.agent._membership.state.epoch is not None)
    assert not inventory(story.options.folder, node="a").memory.has_committed
    story.agent._membership._check_revision(3, seen=9)
    assert story.life is not None
    await asyncio.wait([story.life])
    assert inventory(story.options.folder, node="a").memory.has_committed, "etcd may have forgotten that"


@row(End.ETCD_AWAY_AT_START, 2, "waited for 0.6 s (--wait-for-etcd)", own_etcd=True)
async def etcd_is_away_at_the_start(story: Story) -> None:
    story.etcd.stop()
    await story.begin()


@row(End.ETCD_AWAY_AT_START, 2, "mvcc: database space exceeded; waited for 0.6 s (--wait-for-etcd)")
async def etcd_takes_no_writes_at_the_start(story: Story) -> None:
    story.take_no_writes()
    await story.begin()


@row(End.ETCD_AWAY, 1, "waited for 0.6 s (--wait-for-etcd)", own_etcd=True)
async def etcd_is_away_for_a_node_without_ranks(story: Story) -> None:
    await story.join()
    story.etcd.stop()


@row(End.ETCD_AWAY, 1, "mvcc: database space exceeded; waited for 0.6 s (--wait-for-etcd)")
async def etcd_takes_no_writes_from_a_node_that_leaves(story: Story) -> None:
    await story.join()
    story.take_no_writes()
    signal.raise_signal(signal.SIGTERM)


@row(End.ETCD_AWAY, 1, "mvcc: database space exceeded; waited for 0.6 s (--wait-for-etcd)")
async def etcd_does_not_let_an_evicted_node_back(story: Story) -> None:
    """Its ranks were training, so that it waited without limit until it was evicted."""

    async def end_ranks(_: str) -> None:
        story.agent._ranks.running = {}

    await story.join()
    story.agent._watch.end = end_ranks  # type: ignore[method-assign]
    story.agent._ranks.running = {0: SimpleNamespace()}  # type: ignore[dict-item]
    story.agent._patience.need(False)
    story.take_no_writes()
    story.delete("nodes/a")


@row(End.SIGNALLED, 130, "SIGINT: node a leaves at once")
async def somebody_types_ctrl_c(story: Story) -> None:
    await story.join()
    signal.raise_signal(signal.SIGINT)


@row(End.SIGNALLED, 143, "SIGTERM: node a leaves at once")
async def sigterm_comes_twice(story: Story) -> None:
    await story.join()
    await story.be_joined_by_b()
    story.begin_epoch(story.b, start_step=COMMITTED)
    await story.until(lambda _: story.agent._membership.state.epoch is not None)
    await story.until(lambda _: "b" in story.agent._membership.state.nodes)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0)
    await story.until(lambda state: "a" in state.notices)
    signal.raise_signal(signal.SIGTERM)


@row(End.SIGNALLED, 143, "SIGTERM: node a leaves at once")
async def sigterm_comes_before_the_node_has_joined(story: Story) -> None:
    await story.be_joined_by_b()
    story.end_job(1, "its nodes have yet to see this end")
    story.put("token", "known")
    await story.begin()
    await story.warmed_up.wait()
    signal.raise_signal(signal.SIGTERM)


@row(End.FAILED, 1, "RuntimeError: a task's fault")
async def a_task_fails(story: Story) -> None:
    async def fail() -> None:
        raise RuntimeError("a task's fault")

    await story.join()
    story.agent._start(fail)


@row(End.FAILED, 1, "RuntimeError: a thread's fault")
async def a_thread_of_the_membership_fails(story: Story) -> None:
    def fail() -> JobState:
        raise RuntimeError("a thread's fault")

    await story.join()
    story.agent._membership._reader.read = fail  # type: ignore[method-assign]


@row(End.FAILED, 1, "OSError: closing it failed as well")
async def ending_fails_as_well(story: Story) -> None:
    async def fail() -> None:
        raise OSError("closing it failed as well")

    def fail_to_close() -> None:
        raise OSError("no second failure skips the lease")

    await story.join()
    story.agent._planning = SimpleNamespace(close=fail_to_close)  # type: ignore[assignment]
    story.agent._start(fail)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def etcd_for(row: Row, shared: EtcdServer, folder: Path) -> AsyncIterator[EtcdServer]:
    if not row.own_etcd:
        yield shared
        return
    own = EtcdServer(folder / "etcd")
    await asyncio.to_thread(own.start)
    try:
        yield own
    finally:
        own.stop()


def test_every_end_is_in_the_table() -> None:
    assert {row.end for row in ROWS.values()} == set(End)


def is_documented(message: str, exit_code: int) -> bool:
    """Whether a row of the table of docs/elastic.md has the message with its exit code, and what becomes of copies."""
    table = (ROOT / "docs/elastic.md").read_text(encoding="utf-8").partition("## How a job ends")[2].partition("###")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            messages, codes, copies, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            patterns = [re.escape(text).replace(r"\.\.\.", ".*") for text in re.findall("`(.+?)`", messages)]
            has_code = str(exit_code) in re.findall(r"\d+", codes) and (copies == "deleted") == (exit_code == 0)
            if has_code and any(re.search(pattern, message) for pattern in patterns):
                return True
    return False


@pytest.mark.parametrize("name", ROWS)
def test_an_end(name: str, etcd: EtcdServer) -> None:
    """Copies stay unless the exit code is 0, the message says why, and the place in the job is given up."""
    row = ROWS[name]

    async def tell(folder: Path) -> None:
        async with etcd_for(row, etcd, folder) as server:
            story = Story(server, folder, f"end-{uuid.uuid4().hex[:8]}")
            copies = story.options.folder / "epoch_00000001"
            await row.tell(story)
            assert story.life is not None
            end = await story.life
            message = end.message(job=story.options.job, folder=story.options.folder, committed=story.agent.committed)
            assert (end.kind, end.exit_code) == (row.end, row.exit_code), message
            assert row.says in message
            assert is_documented(message, end.exit_code)
            if story.agent._has_joined or copies.exists():
                assert copies.exists() == (end.exit_code != 0)
                assert read_events(folder / "a.events.jsonl")[-1].kind == "finished"
            has_steps = story.agent.committed > 0
            if end.exit_code != 0 and has_steps and story.agent._has_joined and end.kind not in ends.HAVE_THEIR_OWN_FIX:
                assert f"start the agents again under --job {story.options.job}" in message
            if not row.own_etcd:
                state = story.store.read()
                assert "a" not in state.nodes or state.nodes["a"] != story.agent._node
            story.store.close()

    with short_folder() as folder:
        asyncio.run(tell(folder))
