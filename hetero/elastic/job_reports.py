"""What the leader reads out of the reports of nodes: how far they are, how long steps take, what is wrong for good."""

from hetero.elastic.job_store import JobState
from hetero.elastic.leadership import View
from hetero.elastic.records import Epoch, NodeInfo, NodeReport, Outcome, RankPhase

_PHASES: tuple[RankPhase, ...] = ("joined", "built", "restored", "step", "stopped", "finished")
"""In the order in which a rank comes to them."""


def measured_step_s(state: JobState) -> float:
    """Of the slowest rank, 0 as long as none has said."""
    return max((rank.step_s for report in state.reports.values() for rank in report.ranks), default=0.0)


def phase_of_node(report: NodeReport | None, node: NodeInfo, epoch: Epoch | None) -> RankPhase | None:
    """The phase that all ranks of a node have reached, ``failed`` if one has failed."""
    if report is None or epoch is None or report.incarnation != node.incarnation:
        return None
    phases = [rank.phase for rank in report.ranks if rank.epoch == epoch.number]
    if any(phase in ("failed", "bad_copy") for phase in phases):
        return "failed"
    if len(phases) < node.num_ranks:
        return None
    return min(phases, key=_PHASES.index)


def finished_step(state: JobState) -> int:
    """Return the step after which ranks of the newest epoch have finished the run, 0 if none has."""
    number = 0 if state.epoch is None else state.epoch.number
    ranks = [rank for report in state.reports.values() for rank in report.ranks if rank.epoch == number]
    return max((rank.step for rank in ranks if rank.phase == "finished"), default=0)


def all_out(view: View) -> bool:
    """Whether all ranks of the epoch have ended as they were to."""
    if view.epoch is None:
        return False
    phases = [node.phase for each in view.epoch.nodes if (node := view.nodes.get(each.node.name)) is not None]
    return len(phases) == len(view.epoch.nodes) and all(phase in ("stopped", "finished") for phase in phases)


def wrong_input(state: JobState) -> Outcome | None:
    """The end of a job whose ranks say that their input is wrong, which another epoch would not change."""
    for report in state.reports.values():
        for rank in report.ranks:
            if state.epoch is not None and rank.epoch == state.epoch.number and rank.is_wrong_input:
                return Outcome(exit_code=2, reason=f"rank {rank.rank} on node {report.node}: {rank.detail}")
    return None


def stopped_everywhere(state: JobState) -> bool:
    """Return whether every node that is there has ended its ranks of the newest epoch, and no rank has finished."""
    number = 0 if state.epoch is None else state.epoch.number
    for name, node in state.nodes.items():
        report = state.reports.get(name)
        if report is None or report.incarnation != node.incarnation or report.ended < number:
            return False
        if any(rank.epoch == number and rank.phase == "finished" for rank in report.ranks):
            return False
    return True
