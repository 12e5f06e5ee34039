"""What the fork server of an agent imports once, and what its forks do: run a rank, or serve the ranks' store.

Runs no torch operation while it is imported: the threads of one do not fork. It reads and sets the environment, since
here a process becomes a rank, as under a launcher.
"""

import contextlib
import gc
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from hetero.distributed.helper_processes import STOP_SIGNALS, end_with_parent

# Ends with the agent, and so do its forks with it; before the imports that take seconds.
end_with_parent(os.getppid())
# Nothing else ends it: a supervisor may signal every process, of which the ranks finish their step and commit it.
for _number in STOP_SIGNALS:
    signal.signal(_number, signal.SIG_IGN)

from hetero.distributed.environment import set_cuda_environment  # noqa: E402
from hetero.distributed.process_output import ignore_output_errors  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch then counts devices without starting CUDA, which would not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
set_cuda_environment(os.environ)

from hetero.runtime import cpu_backend  # noqa: E402

cpu_backend.install()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (torch.optim imports it at its first step)

import hetero.runtime.trainer  # noqa: E402, F401
from hetero.distributed.rendezvous_store import serve_store as serve_rendezvous  # noqa: E402
from hetero.elastic.records import RankAssignment  # noqa: E402
from hetero.plan.ir import Plan  # noqa: E402
from hetero.private_files import open_for_writing  # noqa: E402
from hetero.serialization import adapter_of  # noqa: E402

for _record in (Plan, RankAssignment):
    adapter_of(_record)

_PARENT = os.getpid()

# Forks share what was imported here, and need not look through it for garbage.
gc.collect()
gc.freeze()


def run_rank(program: str, flags: Sequence[str], variables: Mapping[str, str], output: str, parent: int) -> None:
    """Run ``program`` as a launcher would start it; everything it prints goes to the file ``output``.

    What cannot be written there goes to the agent's own output.
    """
    end_with_parent(parent)
    agents_output = os.dup(1)
    with contextlib.suppress(OSError), open_for_writing(Path(output), "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own text streams
    ignore_output_errors(fallback=agents_output)
    os.environ |= variables
    sys.argv = [program, *flags]
    # The other signals stay ignored: the agent ends its ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.path.insert(0, str(Path(program).resolve().parent))
    runpy.run_path(program, run_name="__main__")


def serve_store(host: str, port_to: Connection, parent: int) -> None:
    """Serve the store that the ranks of an epoch meet over, on ``host`` alone, until this process is killed."""
    end_with_parent(parent)
    # A node whose address is not one of its own could not be watched by the others either.
    served = serve_rendezvous(host, has_other_hosts=False)
    port_to.send(served.port)
    served.close_when_all_connected()
    threading.Event().wait()


def probe_cuda(answer_to: Connection, parent: int) -> None:
    """Tell whether a fork of the server can still start CUDA: an empty text, or what went wrong."""
    end_with_parent(parent)
    problem = ""
    try:
        if torch.cuda.is_initialized():
            problem = "an import has initialised CUDA"
        elif torch.cuda.is_available():
            torch.cuda.init()
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:200]
    answer_to.send((problem, _PARENT))
