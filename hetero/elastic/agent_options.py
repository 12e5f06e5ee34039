"""What an agent is told about its node and its job."""

from dataclasses import dataclass, field
from pathlib import Path

from hetero.elastic.copy_tls import CopyTls
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.leadership import LeaderSettings
from hetero.elastic.notices import MetadataSource
from hetero.elastic.records import CopyTrust, JobSettings, UploadSchedule
from hetero.elastic.stragglers import StragglerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """name, node_type, host, failure_domain: as in :class:`~hetero.elastic.records.NodeInfo`.

    lease_s: after which a silent node counts as lost.
    wait_for_etcd_s: how long an agent waits for an etcd that it needs, see :mod:`hetero.elastic.etcd_patience`.
    port: of the server of copies, 0 for a free one.
    folder: for copies, in memory.
    logs: folder for the event log and what ranks print.
    leave_within_s: how long after SIGTERM the node is there.
    uploads: how often a step goes to the object store.
    keep_uploads: how many steps stay there.
    tls: of copies, ``None`` where they travel in plain HTTP.
    """

    job: str
    etcd: EtcdAddress
    lease_s: int
    wait_for_etcd_s: float
    name: str
    node_type: str
    host: str
    port: int
    failure_domain: str
    folder: Path
    logs: Path
    settings: JobSettings
    leave_within_s: float
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    metadata: MetadataSource | None = None
    object_store: str | None = None
    stragglers: StragglerSettings = field(default_factory=StragglerSettings)
    uploads: UploadSchedule = field(default_factory=UploadSchedule)
    keep_uploads: int = 2
    tls: CopyTls | None = None

    @property
    def trust(self) -> CopyTrust | None:
        """Which servers of copies this node trusts, ``None`` where copies travel in plain HTTP."""
        return None if self.tls is None else self.tls.trust

    @property
    def reports_socket(self) -> Path:
        """Where ranks send their reports."""
        return self.folder / "reports.sock"
