"""Checks that a device works on all streams of a rank side by side, each in a hardware queue of its own."""

from collections.abc import Mapping

from hetero.errors import ConfigError
from hetero.plan.communicators import HARDWARE_QUEUES, PlanCommunicators
from hetero.plan.ir import Plan
from hetero.plan.stream_roles import other_streams

BY_DEFAULT = "8"
"""Queues that CUDA gives a device (CUDA programming guide, environment variables)."""


def check_hardware_queues(plan: Plan, environment: Mapping[str, str]) -> None:
    """The devices of this host have a queue for every stream of a rank, where the plan has pipelines.

    Streams that share one wait for what the other waits for: with a single one, more than half of the pipelines in the
    tests stand still (``Transport.ONE_QUEUE`` of the dry run).

    Raises:
        ConfigError: the environment says that they have fewer.
    """
    given = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", BY_DEFAULT)
    if all(len(replica.stages) == 1 for replica in plan.replicas):
        return  # Everybody comes to all collectives in one order.
    needed = other_streams(plan) + max(PlanCommunicators(plan).counts().values())
    if not given.isdecimal() or int(given) < min(needed, HARDWARE_QUEUES):
        raise ConfigError(
            f"environment: CUDA_DEVICE_MAX_CONNECTIONS is {given}, but a rank of this plan has {needed} streams, and "
            f"pipelines can stand still where these share queues; set it to {HARDWARE_QUEUES}"
        )
