"""Limits of what a peer may cost: connections, descriptors, memory, time and lines of a log.

A *stranger* is a connection that has not shown the job's token yet; a *peer* has. Everything here bounds what either
can take from a process of ours; the size of a copy is bounded by the plan, which says how large it is.
"""

import resource

MAX_STRANGERS = 256
"""Connections without the token that a server keeps at once; the oldest that has said least makes room for the next.
An honest peer shows the token with its first bytes, so only those count that are on their way. A quarter of 1,024
descriptors, the smallest usual limit: :func:`max_peers` takes half, and a quarter is left for the process itself."""

STRANGER_GRACE_S = 0.1
"""Seconds that a stranger whose bytes have come and were not read yet gets at least, while others wait in the kernel's
queue: time for a look at them, and for the round trips of a TLS handshake. A server takes ``MAX_STRANGERS /
STRANGER_GRACE_S`` = 2,560 of them a second; silent ones, and those with a part of a head, as fast as they come."""

HEAD_WITHIN_S = 5.0
"""Seconds from the accepted connection to the end of a request's head with the token, TLS handshake included: a few
round trips between continents, and a peer that computes on all cores."""

MAX_PEERS = 4096
"""Connections with the token that a server keeps at once, where the descriptor limit allows as many
(:func:`max_peers`). One more is closed, and its client tries again."""

IDLE_S = 75.0
"""Seconds after which a peer's connection without a request is closed."""

MAX_HEAD_BYTES = 8192
"""Of a request; those of our client have less than 1,000."""

LONGEST_WAIT_S = 30.0
"""Seconds that a request may ask the server to wait for a copy."""

MAX_ANSWER_BYTES = 256 * 2**20
"""Of a JSON document that a server of copies answers with: an inventory of 100,000 copies has 60 MB."""

MAX_REPORT_BYTES = 2**16
"""Of a datagram with which a rank reports to its agent; the longest has an error of 2,000 characters."""

MAX_SCRAPES = 16
"""Connections to the port of figures (``--hetero-metrics-port``) at once; a Prometheus holds one."""

SCRAPE_WITHIN_S = 10.0
"""Seconds for which one of them may be silent."""

ERRORS_PER_MINUTE = 20
"""Errors of connections and background tasks that a process logs, each with its traceback; the rest is counted."""

MAX_DESCRIPTORS = 2**16
"""Up to which :func:`raise_descriptor_limit` goes. Containers have hard limits of 10^9, and programs that a rank starts
may close every descriptor below the limit one by one."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may, and return it; its children inherit it.

    Descriptors are what connections cost: at the usual soft limit of 1,024 a process runs out of them long before it
    runs out of memory. The hard limit is left as it is, and a limit that is higher already is not lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_DESCRIPTORS:
        return MAX_DESCRIPTORS
    raised = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised


def descriptor_limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_peers(descriptor_limit: int) -> int:
    """Return how many connections of peers a process may keep with so many descriptors: half of them at most."""
    return min(MAX_PEERS, descriptor_limit // 2)
