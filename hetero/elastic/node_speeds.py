"""What the leader knows of how fast nodes compute, and as which node types they count for it.

The plan of an epoch predicts what each of its ranks computes in a step, and the ranks' reports say what it took. A node
that is judged to be slower, or as fast as its type again, counts as another type from then on: the leader's rules for
nodes that join decide whether another plan is worth a stop.
"""

import dataclasses
from collections.abc import Mapping

from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.records import Epoch, EpochNode, NodeInfo, NodeReport
from hetero.elastic.stragglers import (
    Reclassification,
    StragglerSettings,
    StragglerWatch,
    ratio_of_ranks,
    slower_type,
    with_slower_type,
)


class NodeSpeeds:
    """Follows the nodes through the epochs, on a clock that its caller reads, in seconds.

    Attributes:
        problem: the question to the planner, with a node type for every factor that nodes were slower by.
    """

    def __init__(self, problem: PlanningProblem, settings: StragglerSettings) -> None:
        self.problem = problem
        self._settings = settings
        self.begin(None, 0.0)

    def begin(self, epoch: Epoch | None, now_s: float) -> None:
        """A new epoch: what nodes took under another plan says nothing of this one."""
        self._epoch = epoch
        self._predicted_s: Mapping[int, float] = {}
        self._seen: dict[str, int] = {}
        factors = {} if epoch is None else epoch.slower
        self._watch = StragglerWatch(self._settings, factors=factors, now_s=now_s)
        for each in () if epoch is None else epoch.nodes:
            self._know(each.node.node_type, factors.get(each.node.name, 1.0))

    def predict(self, busy_s: Mapping[int, float]) -> None:
        """By rank, the seconds of computing that the plan of the epoch should take; before, nobody is judged."""
        self._predicted_s = busy_s

    def judge(self, reports: Mapping[str, NodeReport], now_s: float) -> list[str]:
        """Take in what nodes have reported since the last call; what has changed, for people."""
        if self._epoch is None or not self._predicted_s:
            return []
        for name, report in reports.items():
            ranks = [rank for rank in report.ranks if rank.epoch == self._epoch.number and rank.phase == "step"]
            step = max((rank.step for rank in ranks), default=0)
            if step <= self._seen.get(name, 0):
                continue
            self._seen[name] = step
            ratio = ratio_of_ranks(self._predicted_s, {rank.rank: rank.compute_s for rank in ranks})
            if ratio is not None:
                self._watch.observe({name: ratio})
        types = {each.node.name: each.node.node_type for each in self._epoch.nodes}
        changes = [each for each in self._watch.judge(now_s) if each.node in types]
        for change in changes:
            self._know(types[change.node], change.factor)
        return [_told(change, types[change.node]) for change in changes]

    def counted(self, node: NodeInfo) -> NodeInfo:
        """The node as the type that it counts as now."""
        # One that came back may be of another type than it was.
        self._know(node.node_type, self._watch.factors.get(node.name, 1.0))
        return _as_slower(node, self._watch.factors)

    def planned(self, epoch: Epoch) -> tuple[EpochNode, ...]:
        """The nodes of an epoch as the types that its plan takes them for."""
        return tuple(dataclasses.replace(each, node=_as_slower(each.node, epoch.slower)) for each in epoch.nodes)

    def slower(self, nodes: tuple[NodeInfo, ...]) -> dict[str, float]:
        """Of ``nodes`` those that count as slower now, by name, and how many times."""
        factors = self._watch.factors
        return {node.name: factors[node.name] for node in nodes if node.name in factors}

    def _know(self, node_type: str, factor: float) -> None:
        if factor != 1.0:
            self.problem = with_slower_type(self.problem, node_type, factor)


def _as_slower(node: NodeInfo, factors: Mapping[str, float]) -> NodeInfo:
    return dataclasses.replace(node, node_type=slower_type(node.node_type, factors.get(node.name, 1.0)))


def _told(change: Reclassification, node_type: str) -> str:
    counts = f"it counts as {slower_type(node_type, change.factor)}"
    if not change.slowness:
        return f"node {change.node} has had nothing to compute for long: {counts}"
    if change.factor == 1.0:
        return f"node {change.node} is as fast as it should be again: {counts}"
    return f"node {change.node} computes {change.slowness:.3g} times as slowly as {node_type} should: {counts}"
