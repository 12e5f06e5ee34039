"""Nodes and epochs of tests in few words."""

from collections.abc import Mapping, Sequence

from hetero.elastic.records import Ancestry, Epoch, EpochNode, NodeInfo, RestorePoint
from hetero.elastic.recovery import INITIAL_WEIGHTS, lineage_of
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

ONE_RANK = plan(gpt2_model(num_layers=2), (replica(stage(layers=(0, 2), ranks=(0,))),))


def node_info(name: str, incarnation: str = "1", node_type: str = "fast", *, domain: str | None = None) -> NodeInfo:
    return NodeInfo(
        name=name,
        incarnation=incarnation,
        node_type=node_type,
        num_ranks=1,
        host="127.0.0.1",
        port=1,
        failure_domain=name if domain is None else domain,
        settings="same",
    )


def epoch_of(
    nodes: Sequence[NodeInfo],
    *,
    number: int = 1,
    start: RestorePoint = INITIAL_WEIGHTS,
    before: Ancestry | None = None,
    name: str | None = None,
    sources: Mapping[str, tuple[str, ...]] | None = None,
    failures: int = 0,
) -> Epoch:
    """Of nodes with one rank each. What its plan is does not matter here.

    Args:
        before: the epoch before, ``None`` for the first.
        name: the id of the epoch, by default one that its number says.
    """
    before = before or Ancestry()
    return Epoch(
        number=number,
        plan=ONE_RANK,
        nodes=tuple(EpochNode(node=node, ranks=(rank,)) for rank, node in enumerate(nodes)),
        start=start,
        ids={**before.ids, number: f"id{number}" if name is None else name},
        lineage=lineage_of(number, start, before.lineage),
        sources=dict(sources or {}),
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        reason="",
        failures=failures,
    )
