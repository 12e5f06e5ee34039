"""SIMULATES a mixed cluster of preemptible nodes: goodput of elastic training, of a restart from the store after every
loss, and of waiting until all nodes are back. Nothing here is measured; step times are the simulator's.

The trace is generated, by a seed that is printed: each node is there for an exponentially distributed time, and away
for another; the defaults are a guess at a busy zone, and parameters of the command.

    python -m tests.bench.bench_spot_trace [--seed 1] [--hours 12] [--figure spot_trace.svg]

Policies
  elastic   a loss costs ``--recovery`` seconds and the steps since the last commit; nodes that come are taken up after
            the dwell time if they shorten the step by 5 %, and cost ``--recovery`` too.
  restart   a loss costs a start, a reload of the state at ``--store`` MiB/s, and the steps since the last checkpoint;
            nodes that come are taken up then only. The plans are as good as ours.
  wait      trains only while all nodes are there, under the plan for all; every return costs a start and a reload.
"""

import argparse
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from hetero.cost.runtime_model import LaunchedRuntime
from hetero.elastic.leadership import LeaderSettings
from hetero.elastic.planning_problem import PlanningProblem, present_cluster
from hetero.elastic.replanning import plan_for
from hetero.errors import PlanError
from hetero.planner.scoring import score_fitted
from hetero.spec.parameters import parameters
from hetero.units import MIB
from tests.unit.planner.clusters import OPT_350M, cluster

BATCH, SEQ_LENGTH = 256, 2048
COPY_EVERY = 2
"""Steps between two copies: what a node of this cluster gets from its network interface (docs/elastic.md)."""


@dataclass(frozen=True, slots=True)
class Change:
    """From a time on, these nodes are there."""

    at_s: float
    nodes: frozenset[str]


def trace(names: Sequence[str], *, seed: int, end_s: float, up_s: float, away_s: float) -> list[Change]:
    """All nodes are there at 0; then each goes and comes by itself."""
    draw = random.Random(seed)
    events = []
    for name in names:
        at_s, is_there = 0.0, True
        while at_s < end_s:
            at_s += draw.expovariate(1 / (up_s if is_there else away_s))
            is_there = not is_there
            events.append((at_s, name, is_there))
    there = set(names)
    changes = [Change(0.0, frozenset(there))]
    for at_s, name, is_there in sorted(events):
        if at_s < end_s:
            (there.add if is_there else there.discard)(name)
            changes.append(Change(at_s, frozenset(there)))
    return changes


class StepTimes:
    """Predicted seconds of a step by what is there, ``None`` where the model does not fit."""

    def __init__(self, problem: PlanningProblem, type_of: Mapping[str, str], *, limit_s: float) -> None:
        self._problem = problem
        self._type_of = type_of
        self._limit_s = limit_s
        self._known: dict[tuple[tuple[str, int], ...], float | None] = {}

    def of(self, nodes: frozenset[str]) -> float | None:
        counts: dict[str, int] = {}
        for node in nodes:
            counts[self._type_of[node]] = counts.get(self._type_of[node], 0) + 1
        key = tuple(sorted(counts.items()))
        if key not in self._known:
            self._known[key] = self._planned(counts) if counts else None
        return self._known[key]

    def _planned(self, counts: Mapping[str, int]) -> float | None:
        try:
            plan = plan_for(self._problem, counts, time_limit_s=self._limit_s)
        except PlanError:
            return None
        scored = score_fitted(plan, self._problem.on(present_cluster(self._problem.cluster, counts)))
        return None if scored is None else scored.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds and steps that a change takes under a policy."""

    recovery_s: float
    restart_s: float
    checkpoint_every: int


Progress = Iterator[tuple[float, float]]
"""Times and the steps that stay done by then; a loss steps back."""


def elastic(changes: Sequence[Change], times: StepTimes, costs: Costs, end_s: float) -> Progress:
    """Agents as they are: losses at once, joins after the dwell time and for a gain."""
    settings = LeaderSettings()
    used: frozenset[str] = frozenset()
    steps = ready_s = began_s = 0.0
    for now_s, until_s, there in _intervals(changes, end_s):
        at_s = now_s
        while at_s < until_s:
            step_s, better_s = times.of(used), times.of(there)
            is_lost = not used <= there or step_s is None
            gains = better_s is not None and step_s is not None and better_s <= step_s * (1 - settings.min_gain)
            if better_s is not None and (is_lost or (gains and at_s >= began_s + settings.dwell_s)):
                if used and not used <= there:
                    steps = max(0.0, steps - COPY_EVERY)
                used, began_s = there, at_s
                ready_s = at_s + costs.recovery_s
                yield at_s, steps
                continue
            dwells_s = began_s + settings.dwell_s
            ends_s = min(until_s, dwells_s) if gains and at_s < dwells_s else until_s
            if is_lost:
                used = frozenset()
            else:
                assert step_s is not None
                steps += max(0.0, ends_s - max(at_s, ready_s)) / step_s
            yield ends_s, steps
            at_s = ends_s


def restart(changes: Sequence[Change], times: StepTimes, costs: Costs, end_s: float) -> Progress:
    """A job that is killed by every loss, and begins again on what is there."""
    used: frozenset[str] = frozenset()
    steps = saved = ready_s = 0.0
    for now_s, until_s, there in _intervals(changes, end_s):
        if not used or not used <= there:
            steps = saved
            used = there if times.of(there) is not None else frozenset()
            ready_s = now_s + costs.restart_s
            yield now_s, steps
        if (step_s := times.of(used)) is not None:
            steps += max(0.0, until_s - max(now_s, ready_s)) / step_s
            saved = max(saved, steps // costs.checkpoint_every * costs.checkpoint_every)
        yield until_s, steps


def wait(changes: Sequence[Change], times: StepTimes, costs: Costs, end_s: float) -> Progress:
    """A job that needs all of its nodes."""
    whole = changes[0].nodes
    step_s = times.of(whole)
    assert step_s is not None, "the model fits the whole cluster"
    steps = saved = 0.0
    for now_s, until_s, there in _intervals(changes, end_s):
        if there == whole:
            steps += max(0.0, until_s - now_s - costs.restart_s) / step_s
            saved = max(saved, steps // costs.checkpoint_every * costs.checkpoint_every)
        else:
            steps = saved
        yield until_s, steps


def _intervals(changes: Sequence[Change], end_s: float) -> Iterator[tuple[float, float, frozenset[str]]]:
    ends = [change.at_s for change in changes[1:]] + [end_s]
    for change, until_s in zip(changes, ends, strict=True):
        yield change.at_s, until_s, change.nodes


Curves = Mapping[str, Sequence[tuple[float, float]]]


def draw(path: Path, changes: Sequence[Change], curves: Curves, end_s: float) -> None:
    """Nodes that are there, and the steps that stay done, over time."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    edges = [change.at_s / 3600 for change in changes] + [end_s / 3600]
    upper.stairs([len(change.nodes) for change in changes], edges, fill=True, color="#b7c0cc")
    upper.set_ylabel("nodes there")
    for (name, curve), colour in zip(curves.items(), ("#2c8a6d", "#c96f12", "#4b83bd"), strict=True):
        lower.plot([at_s / 3600 for at_s, _ in curve], [steps for _, steps in curve], label=name, color=colour)
    lower.set_xlabel("hours (simulated)")
    lower.set_ylabel("steps done")
    lower.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--up", type=float, default=3.0, help="mean hours that a node is there")
    parser.add_argument("--away", type=float, default=0.5, help="mean hours until it comes back")
    parser.add_argument("--recovery", type=float, default=10.0, help="seconds from a loss to the next step")
    parser.add_argument("--start", type=float, default=90.0, help="seconds to start a job anew, without its state")
    parser.add_argument("--store", type=float, default=400.0, help="MiB/s of the object store")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--plan-limit", type=float, default=4.0, help="seconds for each plan")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    spec = cluster(("A100-40", 4, 4), ("V100-16", 4, 4))
    problem = PlanningProblem(
        cluster=spec,
        model=OPT_350M,
        seq_length=SEQ_LENGTH,
        precision="fp32",
        global_batch_size=BATCH,
        distributed_optimizer=True,
        splits_backward=True,
        runtime=LaunchedRuntime(),
    )
    type_of = {f"{each.name}-{i}": each.name for each in spec.node_types for i in range(each.count)}
    end_s = args.hours * 3600
    changes = trace(list(type_of), seed=args.seed, end_s=end_s, up_s=args.up * 3600, away_s=args.away * 3600)
    times = StepTimes(problem, type_of, limit_s=args.plan_limit)
    state_mib = sum(each.numel for each in parameters(OPT_350M)) * 12 / MIB
    costs = Costs(
        recovery_s=args.recovery,
        restart_s=args.start + state_mib / args.store,
        checkpoint_every=args.checkpoint_every,
    )
    whole_s = times.of(changes[0].nodes)
    assert whole_s is not None
    losses = sum(len(b.nodes) < len(a.nodes) for a, b in itertools.pairwise(changes))
    print(f"SIMULATED, seed {args.seed}: {len(type_of)} nodes, {args.hours:g} h, {losses} losses")
    print(f"step on all of them: {whole_s:.3f} s\n")
    print("| policy | steps | goodput, of all nodes all the time |")
    print("|---|--:|--:|")
    policies = {"elastic": elastic, "restart from the store": restart, "wait until all are there": wait}
    curves = {name: list(policy(changes, times, costs, end_s)) for name, policy in policies.items()}
    for name, curve in curves.items():
        print(f"| {name} | {curve[-1][1]:,.0f} | {curve[-1][1] * whole_s / end_s:.0%} |")
    if args.figure is not None:
        draw(args.figure, changes, curves, end_s)


if __name__ == "__main__":
    main()
