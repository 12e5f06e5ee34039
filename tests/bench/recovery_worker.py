"""One process of the bench of recovery, on its host: serves copies, uploads, or loads when it is told to."""

import asyncio
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hetero.elastic.certificate_folder import CertificateFolder
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.copy_tls import server_context, tls_of_etcd
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.records import Copy, RankAssignment
from hetero.elastic.restoring import restore
from hetero.plan.ir import Plan
from hetero.serialization import load
from tests.bench import recovery_state as state

JOB, TOKEN, PORT, TLS_PORT = "bench", "token", 7700, 7800
ADDRESS = "BENCH_HOST_ADDRESS"
"""Variable with the address of the host on which a worker runs."""
PROBE_BYTES = 32 * 2**20
TORCHFT_TIMEOUT = timedelta(minutes=10)


def serve(folder: str, host: str, port: str, certificates: str = "") -> None:
    """A node's server of copies, by TLS if a folder of certificates is given, until it is killed."""
    tls = tls_of_etcd(CertificateFolder(Path(certificates)).address("https://127.0.0.1:1")) if certificates else None

    async def forever() -> None:
        context = None if tls is None else server_context(tls)
        server = CopyServer(Path(folder), job=JOB, node=Path(folder).name, token=TOKEN, tls=context)
        await server.start(host, int(port))
        print("ready", flush=True)
        await asyncio.Event().wait()

    asyncio.run(forever())


def upload(url: str, *files: str) -> None:
    """Units into the object store, and a probe; ``files`` are descriptions of copies beside their shards."""

    async def run() -> None:
        store = ObjectStore(url)
        units = []
        for file in files:
            copy = load(Copy, Path(file))
            units.append(copy.unit)
            await store.upload(copy, Path(file).with_suffix(".safetensors"))
        assert await store.publish(epoch=state.EPOCH, step=state.STEP, units=units)
        await store._put("probe", os.urandom(PROBE_BYTES))

    asyncio.run(run())


def probe(url: str) -> None:
    """Print the MiB per second at which the store gives a file."""
    import obstore  # noqa: PLC0415

    store = ObjectStore(url)._store
    obstore.get_range(store, "probe", start=0, length=2**20)
    start = time.monotonic()
    content = obstore.get(store, "probe").bytes()
    print(len(content) / 2**20 / (time.monotonic() - start))


def dcp_save(kind: str, url: str, num_layers: str) -> None:
    """The same state as torch DCP saves it, in eight files."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    whole = {
        name: state.expected(name, [0] * len(shape), shape).contiguous()
        for name, shape in state.whole_tensors(state.model(int(num_layers)))
    }
    if kind == "dcp-s3torchconnector":
        from s3torchconnector.dcp import S3StorageWriter  # noqa: PLC0415

        writer: Any = S3StorageWriter(region="us-east-1", path=url, s3client_config=_s3_config(), thread_count=8)
    else:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # noqa: PLC0415

        writer = FsspecWriter(url, thread_count=8)
    dcp.save(whole, storage_writer=writer, no_dist=True)


def _s3_config() -> Any:
    from s3torchconnector import S3ClientConfig  # noqa: PLC0415

    return S3ClientConfig(force_path_style=True)


def loads_ours(rank: int, slices: list[Any], assignment: str) -> Callable[[], None]:
    """This project's reader, from wherever the assignment says."""
    told = load(RankAssignment, Path(assignment))

    def report_bad(detail: str) -> None:
        raise AssertionError(detail)

    def run() -> None:
        restore(told, rank=rank, slices=slices, report_bad=report_bad)

    return run


def loads_dcp(kind: str, slices: list[Any], url: str) -> Callable[[], None]:
    """torch DCP, of every tensor of which this rank needs a part the whole: at the edges of a share two too much."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    wanted = {each.name: torch.zeros(each.shape) for each in slices}
    if kind == "dcp-s3torchconnector":
        from s3torchconnector.dcp import S3StorageReader  # noqa: PLC0415
        from s3torchconnector.s3reader import S3ReaderConstructor  # noqa: PLC0415

        reader: Any = S3StorageReader(
            region="us-east-1",
            path=url,
            s3client_config=_s3_config(),
            reader_constructor=S3ReaderConstructor.dcp_optimized(),
        )
    else:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415

        reader = FsspecReader(url)

    def run() -> None:
        dcp.load(wanted, storage_reader=reader, no_dist=True)
        for each in slices:
            at = tuple(slice(o, o + n) for o, n in zip(each.offsets, each.tensor.shape, strict=True))
            each.tensor.copy_(wanted[each.name][at])

    return run


def torchft_send(kind: str, plan_file: str, rank: str) -> None:
    """A rank that has its state, and sends it: prints where, and goes on until it is killed."""
    _be_named_by_address()
    slices = state.slices_of(load(Plan, Path(plan_file)), int(rank), owned=False)
    whole = {_key(each): state.expected(each.name, each.offsets, each.tensor.shape).contiguous() for each in slices}
    del slices
    if kind == "torchft-http":
        from torchft.checkpointing.http_transport import HTTPTransport  # noqa: PLC0415

        sender: Any = HTTPTransport(timeout=TORCHFT_TIMEOUT, num_chunks=0)
        sender.send_checkpoint([1], state.STEP, whole, timeout=TORCHFT_TIMEOUT)
        print(sender.metadata(), flush=True)
    else:
        store = torch.distributed.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        address = f"{store.host}:{store.port}"
        print(address, flush=True)
        _torchft_group(address, rank=0, in_place={}).send_checkpoint([1], state.STEP, whole)
    signal.pause()


def loads_torchft(kind: str, slices: list[Any], address: str) -> Callable[[], None]:
    """torchft's transports, from the same rank of another replica."""
    _be_named_by_address()
    wanted = {_key(each): each.tensor for each in slices}
    if kind == "torchft-pg":
        transport = _torchft_group(address, rank=1, in_place=wanted)
    else:
        from torchft.checkpointing.http_transport import HTTPTransport  # noqa: PLC0415

        transport = HTTPTransport(timeout=TORCHFT_TIMEOUT, num_chunks=0)

    def run() -> None:
        received = transport.recv_checkpoint(0, address, state.STEP, timeout=TORCHFT_TIMEOUT)
        for key, tensor in wanted.items():
            if received[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(received[key])

    return run


def _torchft_group(address: str, *, rank: int, in_place: dict[str, torch.Tensor]) -> Any:
    """torchft's transport over a process group of two, connected; receives into ``in_place``."""
    from torchft.checkpointing.pg_transport import PGTransport  # noqa: PLC0415
    from torchft.process_group import ProcessGroupGloo, reconfigure_with_store  # noqa: PLC0415

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    group = ProcessGroupGloo(timeout=TORCHFT_TIMEOUT)
    reconfigure_with_store(group, f"{address}/bench", rank, 2)
    group.barrier().wait()
    return PGTransport(group, TORCHFT_TIMEOUT, torch.device("cpu"), state_dict=lambda: in_place)


def _be_named_by_address() -> None:
    """Let torchft, which tells others the machine's name, find this network namespace by it: it has no name."""
    socket.gethostname = lambda: os.environ[ADDRESS]


def _key(each: Any) -> str:
    return f"{each.name} {list(each.offsets)}"


def measured(kind: str, plan_file: str, rank: str, source: str, barrier: str) -> None:
    """Load when the bench says so; print when that began and ended, on the machine's clock, and check the values."""
    slices = state.slices_of(load(Plan, Path(plan_file)), int(rank), owned=False)
    if kind == "ours":
        run = loads_ours(int(rank), slices, source)
    elif kind.startswith("dcp"):
        run = loads_dcp(kind, slices, source)
    else:
        # A storage for each tensor, as modules of torch have: torchft sends whole storages.
        slices = [dataclasses.replace(each, tensor=torch.zeros_like(each.tensor)) for each in slices]
        run = loads_torchft(kind, slices, source)
    torch.set_num_threads(1)
    folder = Path(barrier)
    (folder / f"ready-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    start = time.monotonic()
    run()
    end = time.monotonic()
    state.check(slices)
    total = sum(each.tensor.nbytes for each in slices)
    print(start, end, total, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
