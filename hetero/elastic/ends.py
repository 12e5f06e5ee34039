"""Lists every way in which an agent ends, with its exit code and what is said to its user.

The one rule: an agent deletes its node's copies at exit code 0 and at no other. Exit code 0 means that what had to be
saved is saved, or that the job goes on without this node and its copies. docs/elastic.md has the same table for users.
"""

import enum
import shlex
import traceback
from dataclasses import dataclass
from pathlib import Path

from hetero.elastic.copy_folder import epochs_in
from hetero.elastic.etcd import EtcdAddress
from hetero.errors import HeteroError, MembershipStoreError


class End(enum.Enum):
    """Name and exit code of an end; ``SIGNALLED`` adds the number of the signal."""

    FINISHED = ("finished", 0)
    """All ranks of the job have finished."""
    FINISHED_WITHOUT_ETCD = ("finished_without_etcd", 0)
    """The ranks of this node have finished, and etcd could not take note of it in time."""
    LEFT = ("left", 0)
    """The node has left, and the others have gone on without it."""
    LEFT_LAST = ("left_last", 1)
    """The node has left, and no node stays."""
    LEFT_TOO_LATE = ("left_too_late", 1)
    """The time of a notice was over before the others had gone on without the node."""
    LEFT_WITHOUT_STEP = ("left_without_step", 75)
    """The node has left, and the training has committed no step since its agent started (``EX_TEMPFAIL``)."""
    GAVE_UP = ("gave_up", 1)
    """The leader gave the job up: too few nodes, no whole step, the same failure again and again."""
    WRONG_INPUT = ("wrong_input", 2)
    """A rank or the object store has refused what the user gave, as the next epoch would."""
    REFUSED = ("refused", 2)
    """Something about this node, its flags or its folders is wrong."""
    JOB_IS_OVER = ("job_is_over", 2)
    """The job had finished before this agent came."""
    JOB_BEGINS_AGAIN = ("job_begins_again", 1)
    """The job of this node is over or forgotten, and begins again with it: this agent starts once more."""
    TOKEN_LOST = ("token_lost", 2)
    """etcd has lost the data of the job, or has another job's."""
    WENT_BACK = ("went_back", 2)
    """etcd has older data of the job than it had, as after a restore."""
    ETCD_AWAY_AT_START = ("etcd_away_at_start", 2)
    """etcd did not let the node join within ``--wait-for-etcd``."""
    ETCD_AWAY = ("etcd_away", 1)
    """A node whose ranks do not train needed etcd for longer than ``--wait-for-etcd``."""
    SIGNALLED = ("signalled", 128)
    """SIGINT, a second SIGTERM, or any of both before the node has joined."""
    FAILED = ("failed", 1)
    """A fault of the agent itself, in one of its tasks or threads."""

    @property
    def exit_code(self) -> int:
        """Of the agent."""
        return self.value[1]


HAVE_THEIR_OWN_FIX = frozenset(
    {End.REFUSED, End.JOB_IS_OVER, End.JOB_BEGINS_AGAIN, End.TOKEN_LOST, End.ETCD_AWAY_AT_START}
)
"""Ends whose reasons say what to do before agents can be started again."""


class EndError(HeteroError):
    """An error that ends the agent in a way of its own."""

    def __init__(self, kind: End, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEnd:
    """How an agent has ended.

    reason: for people.
    """

    kind: End
    reason: str
    exit_code: int

    @property
    def keeps_copies(self) -> bool:
        """Whether the copies of the node stay."""
        return self.exit_code != 0

    def message(self, *, job: str, folder: Path, committed: int) -> str:
        """Return the reason, and how the job goes on from the copies that are kept.

        Args:
            folder: of the copies of this node.
            committed: the newest committed step that the node knows, 0 for none.
        """
        if not self.keeps_copies or self.kind in HAVE_THEIR_OWN_FIX or committed == 0:
            return self.reason
        kept = f"the copies of this node are kept in {folder}: " if epochs_in(folder) else ""
        return (
            f"{self.reason}; {kept}start the agents again under --job {job} to go on from the newest whole step "
            f"(step {committed} was committed)"
        )


def end_of(kind: End, reason: str, *, signal_number: int = 0) -> AgentEnd:
    """Return the end of this kind with its exit code."""
    return AgentEnd(kind=kind, reason=reason, exit_code=kind.exit_code + signal_number)


def end_without_step(end: AgentEnd, *, resumes: bool) -> AgentEnd:
    """Return the end of a node with a notice whose training has committed no step since its agent started.

    Whoever starts agents again at each end of a time limit learns by the exit code that this would never end.

    Args:
        resumes: the job has ended, and goes on when its agents are started again.
    """
    if end.kind in (End.LEFT, End.LEFT_LAST, End.LEFT_TOO_LATE) or (end.kind is End.FINISHED and resumes):
        return end_of(End.LEFT_WITHOUT_STEP, f"{end.reason}; no step was committed since this agent started")
    return end


def end_of_job(exit_code: int, reason: str) -> AgentEnd:
    """Return the end of an agent whose job has ended with ``exit_code``."""
    kind = {0: End.FINISHED, 1: End.GAVE_UP}.get(exit_code, End.WRONG_INPUT)
    return AgentEnd(kind=kind, reason=reason, exit_code=exit_code)


def end_by_error(error: BaseException, *, has_joined: bool, has_finished: bool) -> AgentEnd:
    """Return the end that an error leads to.

    Args:
        has_joined: the node has been in the job.
        has_finished: all ranks of this node have finished the run.
    """
    if isinstance(error, EndError):
        return end_of(error.kind, str(error))
    if isinstance(error, MembershipStoreError):
        if has_finished:
            return end_of(
                End.FINISHED_WITHOUT_ETCD, f"all ranks of this node have finished; etcd was not told: {error}"
            )
        return end_of(End.ETCD_AWAY if has_joined else End.ETCD_AWAY_AT_START, str(error))
    if isinstance(error, HeteroError):
        return end_of(End.REFUSED, str(error))
    said = "".join(traceback.format_exception(error)).rstrip()
    return end_of(End.FAILED, f"the agent failed, which is a fault of its program:\n{said}\n{type(error).__name__}")


def forget_command(etcd: EtcdAddress, job: str) -> str:
    """Return the command that deletes all that etcd has of a job."""
    files = (("--etcd-ca", etcd.ca), ("--etcd-cert", etcd.certificate), ("--etcd-key", etcd.key))
    words = ["hetero", "elastic", "forget", "--etcd", ",".join(etcd.urls), "--job", job]
    return shlex.join([*words, *(word for flag, path in files if path is not None for word in (flag, path))])
