"""The cluster that discovery describes, and remarks on its figures."""

from dataclasses import dataclass
from typing import Literal

from hetero.spec.cluster import ClusterSpec

RemarkKind = Literal["found", "assumed", "unknown"]
"""Found: where a figure is from. Assumed: the file has a figure that nobody measured. Unknown: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """What is to be said of a place in the cluster file.

    place: the keys that lead there; an entry of a list by its name.
    todo: how to find it out, as a command where there is one.
    """

    place: tuple[str, ...]
    kind: RemarkKind
    text: str
    todo: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedCluster:
    """A cluster, and what is known and not known of it."""

    cluster: ClusterSpec
    remarks: tuple[Remark, ...]
