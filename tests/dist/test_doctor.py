"""``hetero doctor`` on several ranks: they tell one another who they are, then try what a training needs."""

import json
import re
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hetero.distributed import launch_store
from hetero.doctor import channels
from hetero.doctor import links as links_module
from hetero.doctor.channels import first_messages
from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis, Finding, MeasuredLink
from hetero.doctor.links import measure_links
from hetero.doctor.world import Trial, check_facts, collected, exchanged_facts, try_together, world_findings
from hetero.errors import MembershipError
from hetero.plan.ir import Plan
from hetero.serialization import from_json, save
from tests.helpers.forked_launch import forked
from tests.helpers.layouts import layouts
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage, uneven_plan
from tests.helpers.ranks import run_ranks
from tests.unit.doctor.samples import V100, host, rank_of, torch_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

CPU = torch.device("cpu")
DOCTOR = "hetero/doctor/__main__.py"
HERE = {"driver"} if torch.version.cuda is not None and not torch.cuda.is_available() else set()
"""Subjects of this machine's own problems: PyPI's torch is built for CUDA, whose driver may be missing."""


def facts_of(rank: int, world_size: int) -> HostFacts:
    """The first half sits on one host, the other half on another, whose NCCL is an older one."""
    half = world_size // 2
    slow = host(V100, host="slow", torch=torch_of(V100, nccl="2.29.3"))
    return rank_of(host() if rank < half else slow, rank, world_size=world_size, local_world_size=half)


def tell(rank: int, world_size: int, plan: Plan | None, link_seconds: float) -> tuple[tuple[Finding, ...], Diagnosis]:
    store = dist.PrefixStore("doctor", _get_default_store())
    ranks = exchanged_facts(store, facts_of(rank, world_size), rank=rank, world_size=world_size)
    trial = Trial(ranks[rank].host)
    links = try_together(trial, ranks, CPU, plan=plan, link_seconds=link_seconds)
    found = Diagnosis(hosts=(), findings=tuple(trial.findings), links=tuple(links))
    of_ranks = list(collected(store, found, rank=rank, world_size=world_size))
    findings = world_findings(of_ranks, num_hosts=2) if rank == 0 else ()
    return check_facts(ranks), Diagnosis(hosts=(), findings=findings, links=tuple(links))


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_versions_that_differ_are_named_and_links_are_measured() -> None:
    (before, after), *others = run_ranks(tell, 4, 4, None, 20.0)
    assert {facts for facts, _ in others} == {before}, "every rank knows the same"
    (nccl,) = [finding for finding in before if finding.severity != "ok"]
    assert (nccl.severity, nccl.subject, nccl.found) == (
        "problem",
        "NCCL, all hosts",
        "2.29.7 on fast; 2.29.3 on slow",
    )
    assert {each.links for _, each in others} == {after.links}
    assert [(each.ranks, each.hosts) for each in after.links] == [
        ((0, 1), ("fast", "fast")),
        ((2, 3), ("slow", "slow")),
        ((0, 2), ("fast", "slow")),
    ]
    assert all(each.bytes_per_s > 1e6 and 0 < each.latency_s < 1 for each in after.links)
    assert after.severity == "ok"
    told = {each.subject: each for each in after.findings}
    assert set(told) == {"gloo", "links", "links inside a host", "links between hosts"}
    assert told["links"].found == "3 of 3 sampled pairs of ranks measured"


def measured_within(rank: int, seconds: float, tick_s: float) -> list[MeasuredLink]:
    """With a clock that moves on by ``tick_s`` whenever somebody looks."""
    now = [0.0]

    def clock() -> float:
        now[0] += tick_s
        return now[0]

    with mock.patch.object(links_module.time, "monotonic", clock):
        return measure_links([(0, 1), (1, 2), (0, 2)], hosts=["a"] * 3, device=CPU, seconds=seconds)


def test_links_are_measured_as_long_as_there_is_time() -> None:
    by_rank = run_ranks(measured_within, 3, 10.0, 5.0)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert [each.ranks for each in by_rank[0]] == [(0, 1)]
    # There was no time for a larger one.
    assert by_rank[0][0].message_bytes == 4


FIRST_MESSAGES = {
    "tp-1|2|4-sp": "gpt2-tied",
    "micro-batch-dp2x2|tp4x1|dp2x4": "llama-gqa",
    "interleaved-there-and-back": "llama-gqa",
    "idle-ranks": "gpt2-tied",
}
"""Layouts, with a style in which the table has them."""


def send_first_messages(rank: int, plan: Plan) -> int:
    return first_messages(plan, device=CPU)


@pytest.mark.slow
@pytest.mark.rotates("plans")
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(each, id=name)
        for name, style, each in layouts()
        if name in FIRST_MESSAGES and style == FIRST_MESSAGES[name]
    ]
    + [pytest.param(uneven_plan(), id="uneven")],
)
def test_a_first_message_goes_over_each_channel_of_a_plan(wanted: Plan) -> None:
    counted = run_ranks(send_first_messages, wanted.world_size, wanted)
    directions = [0] * wanted.world_size
    for each in wanted.replicas:
        for here, after in pairwise(each.stages):
            for rank in here.ranks + after.ranks:
                directions[rank] += 2
    assert counted == directions


def garbled(rank: int, plan: Plan) -> list[str]:
    """What went wrong on this rank where every sender sends something else."""
    trial = Trial("here")
    microbatch = channels._microbatch

    def twice(*args: object) -> torch.Tensor:
        return 2 * microbatch(*args)  # type: ignore[arg-type]  # those of the function that it stands for

    with mock.patch.object(channels, "_microbatch", twice):
        trial.attempt("channels", lambda: str(first_messages(plan, device=CPU)), todo="look")
    return [finding.found for finding in trial.findings if finding.severity == "problem"]


def test_another_message_than_was_sent_is_a_problem() -> None:
    two_stages = plan(gpt2_model(), [replica(stage(layers=(0, 4), ranks=(0,)), stage(layers=(4, 6), ranks=(1,)))])
    first, second = run_ranks(garbled, 2, two_stages)
    assert first == ["replica 0 boundary 0, backward: rank 0 received something else"]
    assert second == ["replica 0 boundary 0, forward: rank 1 received something else"]


def one_rank_fails(rank: int) -> tuple[Finding, ...]:
    """Rank 1 cannot sum; nothing else is tried there, and what it says reaches rank 0."""
    store = dist.PrefixStore("doctor", _get_default_store())
    trial = Trial(f"host-{rank}")

    def fails() -> str:
        if rank == 1:
            raise RuntimeError("no route to host\nand a stack")
        return "fine"

    trial.attempt("gloo", fails, todo="look")
    trial.attempt("links", lambda: "never on rank 1", todo="look")
    found = Diagnosis(hosts=(), findings=tuple(trial.findings))
    return world_findings(list(collected(store, found, rank=rank, world_size=3)), num_hosts=3)


def test_what_one_rank_cannot_do_is_told_by_rank_0() -> None:
    told, _, _ = run_ranks(one_rank_fails, 3)
    assert [(each.severity, each.subject, each.found, each.hosts) for each in told] == [
        ("ok", "gloo", "fine", ("host-0", "host-2")),
        ("ok", "links", "never on rank 1", ("host-0", "host-2")),
        ("problem", "gloo", "no route to host", ("host-1",)),
    ]


def one_rank_is_missing(rank: int) -> str:
    store = dist.PrefixStore("doctor", _get_default_store())
    if rank == 2:
        return ""
    with mock.patch.object(launch_store, "ARRIVE_WITHIN_S", 1.0), pytest.raises(MembershipError) as caught:
        exchanged_facts(store, facts_of(rank, 4), rank=rank, world_size=3)
    return str(caught.value)


def test_a_rank_that_does_not_arrive_is_named() -> None:
    first, second, _ = run_ranks(one_rank_is_missing, 3)
    assert first == second
    assert first.startswith("ranks 2 did not arrive within 1 s; ")


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_command_on_all_ranks_of_a_launch(tmp_path: Path) -> None:
    wanted = uneven_plan()
    save(wanted, tmp_path / "plan.json")
    run = forked(wanted.world_size, ["--plan", str(tmp_path / "plan.json"), "--link-seconds", "5"], script=DOCTOR)
    problems = set(re.findall(r"^PROBLEM +(\w+)", run.stdout, re.M))
    assert problems == HERE, run.stderr + run.stdout
    assert run.returncode == bool(problems), run.stderr + run.stdout
    for said in (
        r"ranks +8 on 1 host ",
        r"\nWhat came of it when the ranks met\n",
        r"gloo +a sum over 8 ranks",
        r"channels of the plan +a first message",
    ):
        assert re.search(said, run.stdout), run.stdout
    assert run.stdout.count("operating system") == 1, "one rank speaks for its host"


@pytest.mark.slow
def test_a_plan_for_another_launch_is_a_problem(tmp_path: Path) -> None:
    """As JSON, with exit code 1."""
    save(uneven_plan(), tmp_path / "plan.json")
    run = forked(2, ["--plan", str(tmp_path / "plan.json"), "--link-seconds", "0", "--json"], script=DOCTOR)
    assert run.returncode == 1, run.stderr
    found = from_json(Diagnosis, run.stdout, source="stdout")
    assert len(found.hosts) == 1
    problems = [finding for finding in found.findings if finding.severity == "problem"]
    (problem,) = [problem for problem in problems if problem.subject not in HERE]
    assert problem.found == "--plan: it is for 8 ranks, this launch has 2"
    assert found.links == ()
    assert json.loads(run.stdout)["hosts"][0]["torch"]["version"] == torch.__version__
