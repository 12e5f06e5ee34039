"""Loads the measurements that ship with the package: layer profiles and links, with their origin and licence."""

from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.serialization import STRICT, from_json, near_match
from hetero.spec.cluster import NodePair, NodeType, ZonePair
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import Profile, ProfileStore, Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLinks:
    """Measured links inside and between nodes with one type of device."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: str
    inside_node: Link
    all_reduce_inside_node: tuple[GroupLink, ...] = ()
    between_nodes: Link | None = None
    nics_per_node: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedLinks:
    """Measured links of published clusters; its ``pairs`` name device types where a cluster names its node types."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    provenance: Provenance
    nodes: tuple[NodeLinks, ...]
    pairs: tuple[NodePair, ...] = ()
    zones: tuple[ZonePair, ...] = ()

    def of(self, device: str) -> NodeLinks:
        """The links of nodes with ``device``.

        Raises:
            ConfigError: nobody published them.
        """
        known = {node.device: node for node in self.nodes}
        if device not in known:
            hint = near_match(device, list(known)) or f" (known: {', '.join(known)})"
            raise ConfigError(f"no published links of nodes with {device!r}{hint}; measure your own")
        return known[device]

    def node_type(self, device: str, *, gpus_per_node: int, count: int = 1, zone: str = "default") -> NodeType:
        """A node type with ``device`` and the measured links; it is called like the device.

        Raises:
            ConfigError: nobody published the links of such nodes.
        """
        links = self.of(device)
        return NodeType(
            name=device,
            device=device,
            gpus_per_node=gpus_per_node,
            count=count,
            zone=zone,
            inside_node=links.inside_node,
            all_reduce_inside_node=links.all_reduce_inside_node,
            nics_per_node=min(gpus_per_node, links.nics_per_node),
        )


def shipped_profiles() -> ProfileStore:
    """Every profile that ships with the package."""
    folder = files("hetero.data").joinpath("profiles")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return ProfileStore(
        from_json(Profile, folder.joinpath(name).read_text(encoding="utf-8"), source=name) for name in names
    )


def shipped_links() -> PublishedLinks:
    """The links that ship with the package."""
    text = files("hetero.data").joinpath("links.json").read_text(encoding="utf-8")
    return from_json(PublishedLinks, text, source="links.json")
