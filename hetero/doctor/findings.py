"""What ``hetero doctor`` says: a finding is fine, a warning or a problem, and says what to do."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.doctor.facts import HostFacts
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT

Severity = Literal["ok", "warning", "problem"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warning", "problem")
"""From good to bad. With a problem, training does not start or does not end well; a warning costs speed, or may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the checklist.

    subject: what was looked at.
    todo: what to do about it; empty where it is fine.
    hosts: where it was found; empty if it is about all of them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    severity: Severity
    subject: str
    found: AnyText
    todo: AnyText = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """What two ranks measured between them, one message at a time.

    bytes_per_s: of the largest message that there was time for, which had ``message_bytes``.
    latency_s: half of a round trip of a message of 4 bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    bytes_per_s: float
    message_bytes: int
    latency_s: float

    @property
    def is_inside_a_host(self) -> bool:
        return self.hosts[0] == self.hosts[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that ``hetero doctor`` found: facts of every host, the checklist, and links."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    hosts: tuple[HostFacts, ...]
    findings: tuple[Finding, ...]
    links: tuple[MeasuredLink, ...] = ()

    @property
    def severity(self) -> Severity:
        """That of the worst finding."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default="ok")


def merged(findings: Iterable[Finding], *, num_hosts: int) -> tuple[Finding, ...]:
    """The same finding of several hosts becomes one that names them; of all hosts, one that names none."""
    hosts_of: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        hosts_of.setdefault(dataclasses.replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    return tuple(
        dataclasses.replace(finding, hosts=tuple(hosts) if len(hosts) < num_hosts else ())
        for finding, hosts in hosts_of.items()
    )


def joined(parts: Sequence[Diagnosis]) -> Diagnosis:
    """The parts of a diagnosis as one."""
    return Diagnosis(
        hosts=tuple(host for part in parts for host in part.hosts),
        findings=tuple(finding for part in parts for finding in part.findings),
        links=tuple(link for part in parts for link in part.links),
    )
