"""What nodes, ranks and the membership store tell each other. Everything here travels as JSON.

node        a machine with an agent, one failure domain unless it says otherwise
epoch       a time during which the same nodes train under the same plan; numbered from 1, with a random id
unit        the smallest thing that is copied: a shard file with part of what one rank owns
copy        a unit as it was after one step
whole step  one of which some node has a copy of every unit of its epoch
committed   a step whose copies were all whole on two failure domains when the ranks voted
"""

import signal
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from hetero.checkpoint.manifest import Shard, TensorInfo
from hetero.checkpoint.state import CheckpointState
from hetero.plan.ir import Plan
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT
from hetero.version import VERSION

ASSIGNMENT_VARIABLE = "HETERO_ELASTIC"
"""Environment variable of a rank: names the file of its :class:`RankAssignment`."""

DESCRIBE_VARIABLE = "HETERO_ELASTIC_DESCRIBE"
"""Environment variable of a program that is to train nothing: it writes its planning problem
(:class:`hetero.elastic.planning_problem.PlanningProblem`) as JSON to the file that this names, and ends with 0."""


EpochOrStep = Annotated[int, Field(ge=0, lt=10**12)]
"""Of an epoch or a step, from wherever it was read: it has no more digits than names of folders have."""

STOP_FOR_GOOD = signal.SIGURG
"""Signal by which an agent has its ranks save the step in hand and end the run; SIGTERM has them end for another epoch.

Supervisors do not send it, and a process that does not train yet ignores it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node as its agent announces it.

    incarnation: drawn by each start of an agent; a node that was evicted comes back with another.
    node_type: of the cluster file.
    num_ranks: how many it starts, one for each of its devices.
    host: by which the others reach it; ``port`` is that of the server of its copies.
    failure_domain: nodes of one domain may be lost together, as those of a rack; its own name if nothing is said.
    settings: checksum of what has to be the same on all nodes: program, flags, versions.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    incarnation: str
    node_type: str
    num_ranks: int
    host: str
    port: int
    failure_domain: str
    settings: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Part of what one rank owns, and the two ranks that write it.

    owner: the rank whose state it is, in its optimizer's sense.
    keeper: the rank on a node of another failure domain that has the second copy; ``None`` where there is none.
    held: the keeper has the same values in its own memory and writes them itself; else it fetches the owner's file.
    blocks: keys as :func:`hetero.checkpoint.manifest.block_key` writes them.
    num_bytes: of the blocks.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    owner: int
    keeper: int | None
    held: bool
    blocks: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlacement:
    """All units of an epoch. Their blocks tile every tensor of the training state exactly once.

    epoch_id: the id of the epoch, where the placement lies in a folder of copies; empty elsewhere.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    units: tuple[Unit, ...]
    epoch_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A unit after one step, as it lies beside its shard file: a checkpoint of a part of the state.

    shard: file name, size and checksums of the shard.
    tensors: the global tensors that the blocks of the shard are of.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: EpochOrStep
    step: EpochOrStep
    unit: str
    shard: Shard
    tensors: dict[str, TensorInfo]
    state: CheckpointState


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePoint:
    """Where an epoch begins in the history of the run.

    epoch, step: it goes on after this step of that earlier epoch; epoch 0 and step 0 are the initial weights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: EpochOrStep
    step: EpochOrStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestry:
    """An epoch as one of a history: all epochs that came before it. Empty before the first epoch.

    ids: by number the random id of every epoch up to this one, which is the last. If the membership store goes back to
        an earlier state, a number may be used twice; the id distinguishes the two epochs.
    lineage: see :class:`Epoch`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    ids: dict[EpochOrStep, str] = field(default_factory=dict)
    lineage: dict[EpochOrStep, RestorePoint] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of the epoch, 0 before the first."""
        return max(self.ids, default=0)

    @property
    def id(self) -> str:
        """The id of the epoch, empty before the first."""
        return self.ids.get(self.number, "")

    def follows(self, other: "Ancestry") -> bool:
        """Whether this is the epoch ``other``, or a later one of the same history."""
        return self.ids.get(other.number, "") == other.id

    def replaces(self, known: "Ancestry", *, takes_part: bool) -> bool:
        """Whether a node that remembers ``known`` as the newest epoch, and sees this one, is to remember this one.

        Args:
            takes_part: the node has ranks of this epoch. It gives the history of ``known`` up, if that is another.
        """
        return not known.follows(self) and (takes_part or self.follows(known))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """What a node remembers of its job, where its copies are: the membership store may go back.

    newest: the newest epoch that it has seen, empty if none.
    has_committed: a step may have been committed, whatever the store says.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    newest: Ancestry = field(default_factory=Ancestry)
    has_committed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStep:
    """The copies that a node, or the object store, has of one step of one epoch."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: EpochOrStep
    step: EpochOrStep
    units: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a node has.

    units_of_epoch: all units of each epoch that it has copies of, by which one sees whether a step is whole.
    id_of_epoch: the random id of each of these epochs.
    memory: what the node has seen of the job.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node: str
    steps: tuple[HeldStep, ...]
    units_of_epoch: dict[EpochOrStep, frozenset[str]]
    id_of_epoch: dict[EpochOrStep, str]
    memory: NodeMemory = field(default_factory=NodeMemory)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochNode:
    """A node of an epoch, and the ranks that run on it, in the order of its devices."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node: NodeInfo
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch, as one transaction of the membership store makes it true for everybody.

    ids: by number the random id of every epoch so far, this one last (:class:`Ancestry`).
    lineage: by number of each epoch in the history that led here, this one last, where it started. A copy of epoch e
        counts only if e is in here, up to the step at which the next one of the lineage started.
    sources: for every unit of the step that is restored the nodes that have it, nearest first is the reader's choice;
        a unit without nodes comes from the object store. Empty where training starts from the initial weights.
    others: nodes of ``sources`` that have none of the ranks, because they leave or are not needed.
    slower: the nodes, by name, that the plan takes to be so many times as slow as their type.
    rendezvous: host and port of the ranks' store, which lives on the leader's node.
    reason: why this epoch was made, for people.
    failures: how many epochs in a row before this one broke with all their nodes there and committed nothing new.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    number: EpochOrStep
    plan: Plan
    nodes: tuple[EpochNode, ...]
    start: RestorePoint
    ids: dict[EpochOrStep, str]
    lineage: dict[EpochOrStep, RestorePoint]
    sources: dict[str, tuple[str, ...]]
    rendezvous_host: str
    rendezvous_port: int
    reason: AnyText
    failures: int = 0
    others: tuple[NodeInfo, ...] = ()
    slower: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The random id of this epoch."""
        return self.ids[self.number]

    @property
    def ancestry(self) -> Ancestry:
        """This epoch and all before it."""
        return Ancestry(ids=self.ids, lineage=self.lineage)

    def domain_of_rank(self) -> tuple[str, ...]:
        """The failure domain of every rank."""
        domains = {rank: each.node.failure_domain for each in self.nodes for rank in each.ranks}
        return tuple(domains[rank] for rank in range(len(domains)))


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadSchedule:
    """Which committed steps go to the object store: one of ``every_steps`` and ``every_s`` is ``None``.

    every_steps: the first step that is committed at a multiple of these, or after it.
    every_s: the first one that is committed so many seconds after the last that was chosen.
    in_s: of these seconds, how many are left when the epoch begins.
    after_step: the newest step that was published, 0 for none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    every_steps: int | None = None
    every_s: float | None = None
    in_s: float = 0.0
    after_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTrust:
    """Which certificates of servers of copies are trusted.

    file: PEM with the one certificate that all nodes show, or with the authority that has signed theirs.
    is_authority: which of the two it is.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    file: AnyText
    is_authority: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAssignment:
    """What an agent gives each of its ranks in a file that only its user can read (``HETERO_ELASTIC``).

    node: the name of this rank's node.
    token: shows the servers of copies that the reader belongs to the job.
    folder: of the copies of this node, see :mod:`hetero.elastic.copies`.
    reports: the agent's datagram socket, which takes each :class:`RankReport` as one JSON message.
    object_store: URL, ``None`` without.
    uploads: what of it is uploaded there, ``None`` for nothing.
    trust: certificates that the servers of copies may show, ``None`` without TLS.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    job: str
    epoch: Epoch
    node: str
    token: str
    folder: AnyText
    reports: AnyText
    object_store: str | None = None
    uploads: UploadSchedule | None = None
    trust: CopyTrust | None = None


RankPhase = Literal["joined", "built", "restored", "step", "stopped", "finished", "failed", "bad_copy"]
"""``joined`` the world, ``built`` the model, ``restored`` the state, done a ``step``; ``stopped`` when asked to, with
that step committed; ``finished`` the run; ``failed``; met a ``bad_copy``, after which it fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One message of a rank to its agent.

    step: the last that is done.
    committed: the last step known to be committed, 0 for none.
    step_s: seconds of the last step; compute_s: of these this rank's own forwards and backwards, 0 where
        it is not known or there are none.
    copy_every: after every how many steps copies are made.
    detail: for ``failed`` the error, for ``bad_copy`` ``NODE/EPOCH/STEP/UNIT``.
    is_wrong_input: for ``failed``, the next epoch would end the same way.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: int
    rank: int
    phase: RankPhase
    step: int = 0
    committed: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    copy_every: int = 0
    detail: AnyText = ""
    is_wrong_input: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedUnits:
    """What a node has put into the object store of one step.

    num_units: of the whole step, on all nodes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: int
    step: int
    units: frozenset[str]
    num_units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What an agent tells the others about its ranks.

    ended: the newest epoch of which it has no ranks any more, and will start none.
    uploaded: the newest step of which all is in the object store that these ranks own; ``None`` for none.
    ranks: the last report of each rank of the newest epoch, in the order of ranks.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node: str
    incarnation: str
    ended: int
    ranks: tuple[RankReport, ...]
    uploaded: UploadedUnits | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A node is going to leave, or is asked to.

    Other versions of this program may write one: what they say beyond this is left out.

    reason: who said so, for people.
    seconds: until it is gone in any case, counted from when the notice was put; ``None`` if nobody hurries.
    version: of the program that wrote it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {**STRICT, "extra": "ignore"}

    node: str
    reason: AnyText
    seconds: float | None = None
    version: str = VERSION


CopyTransport = Literal["http", "certificate", "authority"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """What has to be the same on all nodes of a job.

    versions: by package; Python too.
    object_store, upload_every: as given to the agents.
    copy_transport: how copies travel between nodes: in plain HTTP, or by TLS that trusts one ``certificate`` or an
        ``authority``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    program: AnyText
    flags: tuple[AnyText, ...]
    versions: dict[str, str]
    object_store: str | None = None
    upload_every: str = ""
    copy_transport: CopyTransport = "http"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFlags:
    """What the flags of a run say of its length and its checkpoints, as far as agents need it.

    num_steps: of the whole run (``--train-iters``).
    save: folder for checkpoints, ``None`` without ``--save``.
    resumes: started again with the same flags, the run loads the newest checkpoint of ``save`` (``--load``).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_steps: int = 0
    save: AnyText | None = None
    resumes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended.

    exit_code: of every agent.
    resumes: it ended before its last step with a checkpoint, and agents with the same settings go on from that.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    exit_code: int
    reason: AnyText
    resumes: bool = False
