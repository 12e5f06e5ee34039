"""Names by which torchrun's command line asks for the rendezvous of this package; needs no torch."""

RENDEZVOUS = "hetero-static"
"""``--rdzv-backend``: agents meet as in torchrun's static rendezvous, at a store that listens on one address alone."""

NODE_RANK = "node_rank"
"""Key of ``--rdzv-conf``; torchrun hands its own ``--node-rank`` to its own static rendezvous alone."""
