"""How CUDA and NCCL are to start is decided before anybody calls them."""

import os

import pytest

import pretrain_gpt
from hetero.distributed.environment import SHARED_DEVICE_DEFAULTS
from tests.helpers.commands import command_line


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        ("--num-experts 8", {}, "EAGER"),
        ("--num-experts=8 --lr 1", {}, "EAGER"),
        ("--num-experts 8", {"CUDA_MODULE_LOADING": "LAZY"}, "LAZY"),
        ("--num-layers 8", {}, None),
    ],
)
def test_all_kernels_are_loaded_at_start_for_experts_alone(
    words: str, given: dict[str, str], expected: str | None
) -> None:
    environment = dict(given)
    pretrain_gpt.load_kernels_at_start(words.split(), environment)
    assert environment.get("CUDA_MODULE_LOADING") == expected


class FirstCallError(Exception):
    """Somebody asks CUDA for something."""


def test_it_is_decided_before_anybody_asks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise FirstCallError

    monkeypatch.setenv("CUDA_MODULE_LOADING", "so that it is put back")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.setattr("hetero.runtime.cpu_backend.install", ask)
    with pytest.raises(FirstCallError):
        pretrain_gpt.main([*command_line(micro_batch_size="1", num_experts="8"), "--disable-bias-linear"])
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"


@pytest.mark.parametrize(("flags", "expected"), [(["--hetero-share-devices"], "1"), ([], None)])
def test_nccl_lets_ranks_share_devices_if_a_flag_says_so(
    flags: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        raise FirstCallError

    for default in SHARED_DEVICE_DEFAULTS:
        monkeypatch.setenv(default.name, "so that it is put back")
        monkeypatch.delenv(default.name)
    monkeypatch.setattr("hetero.runtime.cpu_backend.install", ask)
    with pytest.raises(FirstCallError):
        pretrain_gpt.main([*command_line(micro_batch_size="1", distributed_backend="nccl"), *flags])
    assert os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == expected
