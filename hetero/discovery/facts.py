"""What a rank knows of the node that it runs on, and what the ranks of one node know together. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from hetero.doctor.facts import GpuFacts, HostFacts
from hetero.errors import ConfigError
from hetero.printable_fields import check_name
from hetero.serialization import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTopology:
    """How the GPUs of a node reach one another and its network interfaces, as the driver has it.

    Kinds are ``nvidia-smi``'s: ``NV12`` for 12 NVLinks, ``PIX``, ``PXB``, ``PHB``, ``NODE`` and ``SYS`` for ever more
    of PCIe between the two, ``X`` for the same device.

    pci_addresses: of the GPUs, by the driver's numbers, as the kernel writes them.
    kinds: by GPU, to each GPU.
    nics: by name of a network interface, to each GPU; empty where the driver lists none.
    nvlink_gb_per_s: by GPU, what one of its NVLinks carries in one direction; ``None`` without any.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    pci_addresses: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    nics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nvlink_gb_per_s: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What one rank tells of its node.

    node: its name: Slurm's, or the host's.
    boot_id: of the machine; two nodes of one machine, as containers are, have the same.
    memory_bytes: that a training may use.
    allowed_cores: that this rank may run on, by their numbers; ``core_quota`` is how many cores' time it may use,
        ``None`` without a limit.
    gpus_per_switch: GPUs that reach the host through one PCIe root port.
    pcie_gb_per_s: by PCI address of a GPU, what its narrowest PCIe link carries in one direction; only those known.
    topology: ``None`` where the driver's program is not there, or there are no GPUs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node: str
    host: HostFacts
    boot_id: str | None = None
    memory_bytes: int
    allowed_cores: tuple[int, ...]
    core_quota: float | None = None
    processor: str | None = None
    gpus_per_switch: int = 1
    pcie_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    topology: GpuTopology | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What all ranks of one node know.

    facts: of its first rank.
    gpus: that its ranks see together, each once; none on a node without.
    cores: cores' time of each rank: what others may use too is shared out evenly among them.
    """

    facts: NodeFacts
    gpus: tuple[GpuFacts, ...]
    cores: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.facts.node


def nodes_of(ranks: Sequence[NodeFacts]) -> list[Node]:
    """The nodes of ``ranks``, in the order of their first ranks.

    Raises:
        ConfigError: two machines have one name, or a name is not printable.
    """
    by_name: dict[str, list[NodeFacts]] = {}
    for facts in ranks:
        by_name.setdefault(facts.node, []).append(facts)
    for name, of_node in by_name.items():
        check_name(name, what="the name of a node")
        machines = {facts.boot_id for facts in of_node if facts.boot_id is not None}
        if len(machines) > 1:
            raise ConfigError(
                f"node {name!r}: {len(machines)} machines are called so; give each a host name of its own, or "
                "SLURMD_NODENAME in the environment of its ranks"
            )
    return [
        Node(
            facts=of_node[0],
            gpus=_all_gpus(of_node),
            cores=tuple(_cores(facts, ranks) for facts in of_node),
        )
        for of_node in by_name.values()
    ]


def _all_gpus(of_node: Sequence[NodeFacts]) -> tuple[GpuFacts, ...]:
    """Each device once, by its place on the bus: a launcher may show each rank one device alone."""
    most = max((facts.host.gpus for facts in of_node), key=len)
    if any(gpu.pci_address is None for gpu in most):
        return most
    found = {gpu.pci_address: gpu for facts in of_node for gpu in facts.host.gpus if gpu.pci_address is not None}
    return tuple(found[address] for address in sorted(found))


def _cores(facts: NodeFacts, ranks: Sequence[NodeFacts]) -> float:
    """What is left to a rank of the cores that it may run on, beside the other ranks of its machine."""
    on_machine = [each for each in ranks if each.boot_id == facts.boot_id and each.boot_id is not None] or [facts]
    users = [set(each.allowed_cores) for each in on_machine]
    share = sum(1 / sum(core in allowed for allowed in users) for core in facts.allowed_cores)
    return share if facts.core_quota is None else min(share, facts.core_quota)
