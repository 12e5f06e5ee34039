"""Which errors of a step may be the end of another rank, and which are this rank's own."""

import pytest
import torch.distributed as dist

from hetero.distributed.failure_detector import FailureDetector, FailureDetectorOptions
from hetero.errors import MembershipError

OPTIONS = FailureDetectorOptions(beat_s=0.02, lost_after_s=2.0, roll_call_s=0.2)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"


def raise_under_watch(error: Exception) -> None:
    with FailureDetector(dist.HashStore(), rank=0, world_size=1, options=OPTIONS):
        raise error


@pytest.mark.parametrize(
    "message",
    [
        "layer 3 is disconnected from the loss",
        "cannot connect to the tokenizer's server",
        "this build has no NCCL",
        "DataLoader timed out after 5 seconds",
        f"[enforce fail at {GLOO[1:]}/pair.cc:454] op.preamble.length <= op.nbytes. 8 vs 4",
    ],
)
def test_an_error_of_its_own_stays_what_it_is(message: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise_under_watch(RuntimeError(message))
    assert not isinstance(raised.value, MembershipError)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}/pair.cc:538] Connection closed by peer [127.0.0.1]:4182"),
        RuntimeError(f"{GLOO}/pair.cc:538] Read error [127.0.0.1]:4182: Connection reset by peer"),
        RuntimeError(f"{GLOO}/pair.cc:223] writev [127.0.0.1]:4182: Broken pipe"),
        RuntimeError(f"{GLOO}/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete"),
        RuntimeError(f"{GLOO}/pair.cc:157] Application timeout caused pair closure"),
        RuntimeError(f"Gloo connectFullMesh failed with {GLOO}/pair.cc:144] no error"),
        RuntimeError(f"{GLOO}/pair.cc:1088] Connect timeout [127.0.0.1]:4182"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0"),
        dist.DistNetworkError("The client socket has failed"),
    ],
    ids=str,
)
def test_a_connection_that_breaks_asks_who_is_lost(error: Exception) -> None:
    with pytest.raises(MembershipError, match="every rank still answers"):
        raise_under_watch(error)
