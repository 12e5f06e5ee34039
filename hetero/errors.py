"""Defines the exceptions that are raised on purpose; any other one is a bug.

A message names the object, the value found, the limit it broke, and what to change.
"""


class HeteroError(Exception):
    """Base class of all of them, so that callers can catch whatever this package raises on purpose."""


class ConfigError(HeteroError, ValueError):
    """A cluster, model or training description is wrong."""


class PlanError(HeteroError, ValueError):
    """A plan does not fit its cluster, its model or this launch."""


class PlanMemoryError(PlanError):
    """A stage of a plan takes more memory than its devices have."""


class ScheduleError(HeteroError, ValueError):
    """A pipeline schedule breaks a rule of its order, or deadlocks."""


class MembershipError(HeteroError, RuntimeError):
    """A rank died or stopped answering while others waited for it."""


class MembershipStoreError(HeteroError, RuntimeError):
    """The etcd that the agents of an elastic job meet in does not answer, or refuses a request."""


class StoreRefusalError(MembershipStoreError):
    """That etcd answers, and refuses a request in words of its own: it is full, or asks for a user."""


class CheckpointError(HeteroError, ValueError):
    """A checkpoint is damaged, incomplete, unsafe to read, or of another model."""


class SourceLostError(CheckpointError):
    """A place that has a part of a checkpoint cannot be reached; nothing is known to be wrong with what it has."""


class ObjectStoreError(HeteroError, RuntimeError):
    """The object store of an elastic job does not answer, refuses a request, or is claimed by another leader."""


class ObjectStoreRefusedError(ObjectStoreError):
    """An object store refuses a request, and will until credentials, policy, bucket or clock are corrected."""


class DataError(HeteroError, RuntimeError):
    """A file of training data, or a process that reads it, was lost while training."""


class DeviceMemoryError(HeteroError, RuntimeError):
    """A device has run out of memory while training."""

    @classmethod
    def of(cls, where: str, *, doing: str, detail: str) -> "DeviceMemoryError":
        """The error with its one message: ``where`` names the rank, ``doing`` the work that it could not do."""
        return cls(
            f"{where}: out of memory in {doing}: {detail}; give this stage fewer layers, fewer microbatches in flight, "
            "smaller microbatches, recomputation or more tensor parallelism"
        )
