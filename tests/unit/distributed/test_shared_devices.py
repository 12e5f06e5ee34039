"""Ranks take a device each, or share them where NCCL lets them."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hetero.distributed import shared_devices
from hetero.distributed.shared_devices import can_share_devices, check_nccl_of_shared_devices, index_of_device
from hetero.doctor.launch import _device
from hetero.errors import ConfigError
from hetero.profiling import together
from hetero.profiling.rank_links import RankDevice, check_shared_devices
from tests.helpers import gpu_ranks
from tests.unit.doctor.samples import V100, host, rank_of, torch_of


@pytest.mark.parametrize(
    ("num_devices", "shares_devices", "indices"),
    [(4, False, [0, 1, 2, 3]), (2, False, [0, 1, None, None]), (2, True, [0, 1, 0, 1]), (0, True, [None] * 4)],
)
def test_a_rank_has_a_device_of_its_own_or_a_share(
    num_devices: int, shares_devices: bool, indices: list[int | None]
) -> None:
    assert [index_of_device(rank, num_devices, shares_devices=shares_devices) for rank in range(4)] == indices


@pytest.mark.parametrize(
    ("nccl", "can"), [("2.30.7", True), ("3.0.1", True), ("2.28.9", False), ("2.4.8", False), (None, False)]
)
def test_nccl_lets_ranks_share_a_device_from_2_30_on(
    nccl: str | None, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_share_devices(nccl) == can
    monkeypatch.setattr(shared_devices, "loaded_nccl_version", lambda: nccl)
    if can:
        check_nccl_of_shared_devices(flag="--flag", cuda="12.6")
        return
    with pytest.raises(ConfigError, match=rf"^--flag needs NCCL 2\.30 or newer, {nccl or 'none'} is loaded; .*-cu12>="):
        check_nccl_of_shared_devices(flag="--flag", cuda="12.6")


def test_the_doctor_takes_the_device_of_a_launch() -> None:
    """Without a device for each rank it looks on the processor."""
    one = host(V100, torch=torch_of(V100, num_gpus=1))
    ranks = [rank_of(one, rank, world_size=2, local_world_size=2) for rank in range(2)]
    assert [_device(ranks, rank, shares_devices=True) for rank in range(2)] == [torch.device("cuda", 0)] * 2
    assert [_device(ranks, rank, shares_devices=False) for rank in range(2)] == [torch.device("cpu")] * 2


def test_ranks_of_a_profile_are_on_devices_of_their_own() -> None:
    """Devices of a host that are called alike are told apart; so are processors, which ranks share by cores."""

    def on(*uuids: str | None) -> list[RankDevice]:
        return [RankDevice(node="n", device="A", hardware="an A", uuid=uuid) for uuid in uuids]

    check_shared_devices(on("GPU-1", "GPU-2", "MIG-3"))
    check_shared_devices(on(None, None))
    with pytest.raises(ConfigError, match=r"^ranks 0,2 are on one device of n, an A: .* --share-devices"):
        check_shared_devices(on("GPU-1", "GPU-2", "GPU-1"))


def test_a_rank_of_a_profile_says_which_device_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together._uuid(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    assert together._uuid(torch.device("cuda", 0)) == "GPU-1"


@pytest.mark.parametrize(
    ("ask", "nccl", "skips"),
    [
        pytest.param(gpu_ranks.run_on, "2.30.7", False, id="run"),
        pytest.param(gpu_ranks.end_on, "2.30.7", False, id="end"),
        pytest.param(gpu_ranks.end_on, "2.28.9", True, id="too-old"),
    ],
)
def test_tests_of_ranks_on_a_device_ask_the_nccl_that_is_loaded(
    ask: Callable[..., object], nccl: str, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch was compiled with another one, which test_groups_on_gpu.py asked; and their ranks see the devices."""
    environments: list[object] = []

    def note(*_: object, gpu_environment: object, **__: object) -> list[object]:
        environments.append(gpu_environment)
        return []

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 31, 1) if skips else (2, 28, 9))
    monkeypatch.setattr(gpu_ranks, "loaded_nccl_version", lambda: nccl)
    monkeypatch.setattr(gpu_ranks, "end_of_ranks", note)
    if skips:
        with pytest.raises(pytest.skip.Exception):
            ask("cuda", print, 2)
        assert environments == []
    else:
        if ask is gpu_ranks.run_on:
            with pytest.raises(FileNotFoundError):
                ask("cuda", print, 2)
        else:
            ask("cuda", print, 2)
        assert environments == [gpu_ranks.ENVIRONMENT]
