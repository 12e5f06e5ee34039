"""Compares the settings that have to be the same on all nodes of a job."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hetero.elastic.records import CopyTransport, JobSettings
from hetero.errors import ConfigError
from hetero.serialization import to_json
from hetero.shown_secrets import without_secrets

COPIES_TRAVEL: Mapping[CopyTransport, str] = MappingProxyType(
    {
        "http": "in plain HTTP",
        "certificate": "by TLS with one certificate",
        "authority": "by TLS with certificates of etcd's authority",
    }
)
"""Words for how the copies of a job travel between nodes."""


def settings_checksum(settings: JobSettings) -> str:
    """Make a short text that differs wherever the settings do, for :class:`~hetero.elastic.records.NodeInfo`."""
    return hashlib.sha256(to_json(settings).encode()).hexdigest()[:16]


def shown_settings(settings: JobSettings) -> JobSettings:
    """Return the settings as people and documents may see them: flags may hold URLs with credentials."""
    store = settings.object_store
    return dataclasses.replace(
        settings,
        flags=tuple(map(without_secrets, settings.flags)),
        object_store=None if store is None else without_secrets(store),
    )


def settings_differences(there: JobSettings, here: JobSettings) -> list[str]:
    """Say in words what differs between the settings in the job and those of this agent."""
    said = []
    if there.program != here.program:
        said.append(f"the program is {here.program} here and {there.program} in the job")
    if there.flags != here.flags:
        only_here = [each for each in here.flags if each not in there.flags]
        only_there = [each for each in there.flags if each not in here.flags]
        if only_here or only_there:
            said.append(f"flags: here {_shown(only_here) or 'nothing'}, in the job {_shown(only_there) or 'nothing'}")
        else:
            said.append("the flags come in another order")
    for flag, mine, theirs in (
        ("--object-store", here.object_store, there.object_store),
        ("--upload-every", here.upload_every, there.upload_every),
    ):
        if mine != theirs:
            said.append(
                f"{flag} is {_shown([mine or 'not given'])} here and {_shown([theirs or 'not given'])} in the job"
            )
    if there.copy_transport != here.copy_transport:
        mine, theirs = COPIES_TRAVEL[here.copy_transport], COPIES_TRAVEL[there.copy_transport]
        said.append(f"copies travel {mine} here and {theirs} in the job (--tls-cert, --certificates, --etcd-ca)")
    for name in sorted({*there.versions, *here.versions}):
        mine, theirs = here.versions.get(name, "missing"), there.versions.get(name, "missing")
        if mine != theirs:
            said.append(f"{name} is {mine} here and {theirs} in the job")
    return said


def _shown(words: Sequence[str]) -> str:
    return without_secrets(" ".join(words))


def check_settings(there: JobSettings | None, here: JobSettings) -> None:
    """Refuse an agent whose settings are not those of its job; a job without settings takes any.

    Args:
        there: of the job.
        here: of the agent.

    Raises:
        ConfigError: they differ; names what does.
    """
    if there is None or there == here:
        return
    differences = "; ".join(settings_differences(there, here))
    raise ConfigError(
        f"this agent does not fit to its job: {differences}. Start all agents with the same program, flags and "
        "versions, or this one with another --job"
    )
