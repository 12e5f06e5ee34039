"""Joins the ranks of a launch into the world, over connections that strangers cannot add to."""

import datetime
import os

import torch.distributed as dist

from hetero.distributed.closed_listeners import closed_when_connected
from hetero.distributed.environment import set_one_host_environment
from hetero.peer_limits import raise_descriptor_limit


def join_world(backend: str, store: dist.Store, *, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Make the world's process group; collective over the launch.

    gloo takes no connection once all ranks are connected. Ranks that are all on this host meet on loopback.
    """
    set_one_host_environment(os.environ)
    # Connections that strangers make while a group is being made cost descriptors.
    raise_descriptor_limit()
    with closed_when_connected():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
