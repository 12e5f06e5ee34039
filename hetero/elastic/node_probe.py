"""Finds out at once whether the agent of a node is gone: its host refuses connections to the server of its copies."""

import asyncio
import contextlib
import enum

from hetero.elastic.exhaustion import is_exhaustion
from hetero.elastic.records import NodeInfo

_SILENCE_S = 1.0


class ProbeAnswer(enum.Enum):
    """Of a node's host to an attempt to connect. A silent one may be slow, cut off or stand still; its lease tells."""

    CONNECTED = "connected"
    REFUSED = "refused"
    SILENT = "silent"


async def probe(node: NodeInfo) -> ProbeAnswer:
    """Connect to the node's server of copies, and hang up.

    Raises:
        OSError: this process has no descriptor for that, which says nothing about the node.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(node.host, node.port), _SILENCE_S)
    except ConnectionRefusedError:
        return ProbeAnswer.REFUSED
    except (OSError, TimeoutError) as error:
        if is_exhaustion(error):
            raise
        return ProbeAnswer.SILENT
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ProbeAnswer.CONNECTED
