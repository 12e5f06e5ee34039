"""Records of a small job, as agents write them into etcd."""

from hetero.elastic.job_settings import settings_checksum
from hetero.elastic.records import Epoch, EpochNode, JobSettings, NodeInfo, RestorePoint
from tests.helpers.commands import good_plan

SETTINGS = JobSettings(program="pretrain_gpt.py", flags=("--lr", "0.1"), versions={"torch": "2.13.0"})


def node(name: str, incarnation: str = "first") -> NodeInfo:
    return NodeInfo(
        name=name,
        incarnation=f"{incarnation} of {name}",
        node_type="box",
        num_ranks=1,
        host="127.0.0.1",
        port=1,
        failure_domain=name,
        settings=settings_checksum(SETTINGS),
    )


def epoch(number: int) -> Epoch:
    start = RestorePoint(epoch=0, step=0)
    return Epoch(
        number=number,
        plan=good_plan(),
        nodes=(EpochNode(node=node("a"), ranks=(0,)),),
        start=start,
        ids={number: f"id{number}"},
        lineage={number: start},
        sources={},
        rendezvous_host="127.0.0.1",
        rendezvous_port=2,
        reason="test",
    )
