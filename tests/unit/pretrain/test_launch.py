"""What a launch makes of its flags: the uniform plan, and how long ranks wait; and what it looks at on CUDA."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.failure_detector import FailureDetectorOptions
from hetero.distributed.standstill import StepProgress
from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType
from hetero.spec.found_device import FoundDevice
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from megatron.pretrain import launch, training
from megatron.pretrain.cli.model_config import model_spec
from megatron.pretrain.launch import Launch, _devices, _plan_of_flags, agree_on_plan, joined
from megatron.pretrain.training import describe_rank
from tests.helpers.flags import parse


def plan_of(flags: str, *, world_size: int) -> Plan:
    config = parse(flags)
    model = model_spec(config.model, tokenizer_vocab_size=100)
    made = _plan_of_flags(config, model, [SHIPPED_DEVICES.of("cpu")] * world_size)
    validate(made)
    return made


@pytest.mark.parametrize(
    "flag", ["--num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 1"]
)
def test_virtual_stages_are_dealt_out_in_turns(flag: str) -> None:
    made = plan_of(f"--pipeline-model-parallel-size 2 {flag}", world_size=4)
    for replica, (first, second) in zip(made.replicas, [(0, 2), (1, 3)], strict=True):
        assert [stage.ranks for stage in replica.stages] == [(first,), (second,), (first,), (second,)]
        assert [stage.num_layers for stage in replica.stages] == [1, 1, 1, 1]


def test_a_rank_is_told_with_all_its_stages() -> None:
    made = plan_of("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", world_size=2)
    assert describe_rank(made, 1) == "rank 1 (replica 0 stages 1,3, cpu)"
    plain = dataclasses.replace(plan_of("--pipeline-model-parallel-size 2", world_size=2), idle_ranks=(2,))
    assert describe_rank(plain, 1) == "rank 1 (replica 0 stage 1, cpu)"
    assert describe_rank(plain, 2) == "rank 2 (idle)"


def test_dropout_arrives() -> None:
    made = plan_of("--hidden-dropout 0.3 --attention-dropout 0", world_size=2)
    assert (made.hidden_dropout, made.attention_dropout) == (0.3, 0.0)


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_the_order_arrives(order: str) -> None:
    made = plan_of(f"--pipeline-model-parallel-size 2 --hetero-schedule {order}", world_size=2)
    assert [replica.schedule for replica in made.replicas] == [order]


def test_microbatches_that_make_no_full_round_are_fine() -> None:
    """Megatron-LM refuses them."""
    made = plan_of(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 10", world_size=2
    )
    assert made.replicas[0].num_microbatches(0) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", "2 stages per rank need --pipeline-model-parallel-size 2 or more"),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "2 stages per rank need --pipeline-model-parallel-size 2 or more",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "--pipeline-model-parallel-size 2 x 3 stages per rank does not divide --num-layers 4; .* --hetero-plan",
        ),
    ],
)
def test_stages_that_cannot_be_dealt_out(flags: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(flags, world_size=2)


class HandedOverError(Exception):
    """The failure detector has its options."""


def test_ranks_wait_for_one_another_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[FailureDetectorOptions] = []

    def detector(*_: object, options: FailureDetectorOptions, **__: object) -> None:
        handed_over.append(options)
        raise HandedOverError

    monkeypatch.setattr(launch, "FailureDetector", detector)
    monkeypatch.setattr(launch, "_store", lambda *_: dist.HashStore())
    parallel = parse("--hetero-heartbeat-timeout 7 --distributed-timeout-minutes 2").parallel
    with pytest.raises(HandedOverError), joined(Launch(rank=0, world_size=1, local_rank=0), parallel):
        pass
    assert handed_over == [FailureDetectorOptions(lost_after_s=7.0, arrive_within_s=120.0)]


MINE = DeviceType(name="mine", memory_gib=64)
CLUSTER = ClusterSpec(devices=(MINE,), node_types=(NodeType(name="box", device="mine", gpus_per_node=2),))


@pytest.mark.parametrize("cluster", [None, CLUSTER])
def test_a_launch_by_degrees_takes_the_description_of_its_device_along(cluster: ClusterSpec | None) -> None:
    """Of the host CPU that the cluster file describes, as of the one that ships."""
    config = parse("--pipeline-model-parallel-size 2")
    devices = _devices(config, cluster, [FoundDevice(), FoundDevice()])
    made = _plan_of_flags(config, model_spec(config.model, tokenizer_vocab_size=100), devices)
    validate(made)
    assert {stage.device for _, _, stage in made.stages()} == {"cpu" if cluster is None else "mine"}
    assert made.devices == (() if cluster is None else (MINE,))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A host with one GPU, played as far as a launch asks; what it looks at is noted, in order."""
    looks: list[tuple[Any, ...]] = []
    init = dist.init_process_group

    def begin(backend: str, **options: Any) -> None:
        looks.append(("world", backend))
        init("gloo", **options)

    def look(name: str, subject: object, *_: object) -> tuple[()]:
        """Note the check, which finds no versions of other ranks."""
        looks.append((name, subject))
        return ()

    monkeypatch.setattr(launch.dist, "init_process_group", begin)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: looks.append(("device", device)))
    for name in ("check_versions", "check_kernels", "check_hardware_queues"):
        monkeypatch.setattr(launch, name, partial(look, name))
    yield looks
    if dist.is_initialized():
        dist.destroy_process_group()


def test_on_cuda_versions_and_kernels_are_looked_at_as_soon_as_ranks_can_talk(one_gpu: list[tuple[Any, ...]]) -> None:
    """The world alone has gloo beside NCCL, for objects."""
    cuda = torch.device("cuda", 0)
    parallel = parse("--distributed-backend nccl --hetero-heartbeat-timeout 7").parallel
    with joined(Launch(rank=0, world_size=1, local_rank=0), parallel) as (device, _):
        assert device == cuda
        assert one_gpu == [
            ("world", "cpu:gloo,cuda:nccl"),
            ("device", cuda),
            ("check_versions", cuda),
            ("check_kernels", cuda),
        ]


def test_on_cuda_a_plan_is_held_against_the_hardware_queues(
    one_gpu: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse("--micro-batch-size 1 --global-batch-size 4")
    model = model_spec(config.model, tokenizer_vocab_size=100)
    monkeypatch.setattr(launch, "found_device", lambda _: FoundDevice())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert one_gpu.pop()[0] == "world"
    assert agree_on_plan(config, model, torch.device("cpu")).world_size == 1
    assert one_gpu == []
    made = agree_on_plan(config, model, torch.device("cuda", 0))
    assert one_gpu == [("check_hardware_queues", made)]


class LayersError(Exception):
    """The groups are made."""


def test_the_failure_detector_asks_the_watchdogs_of_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layers_of_ranks(*_: object) -> None:
        raise LayersError

    monkeypatch.setattr(training, "agree_on_plan_and_tokenizer", lambda *_, **__: (None, None))
    monkeypatch.setattr(training, "build_datasets", lambda *_: (None, []))
    monkeypatch.setattr(training, "on_all_ranks", lambda step: None)
    context = SimpleNamespace(groups=("one", "two"), progress=StepProgress())
    monkeypatch.setattr(training, "create_groups", lambda *_, **__: context)
    monkeypatch.setattr(training, "nccl_error", lambda groups: f"lost by {' and '.join(groups)}")
    monkeypatch.setattr(training, "layers_of_ranks", layers_of_ranks)
    detector, config = SimpleNamespace(transport_error=str), parse("")
    stop, elastic = training.Stop(config.run), training.ElasticRank(None, config, rank=0)
    alone = Launch(rank=0, world_size=1, local_rank=0)
    with pytest.raises(LayersError):
        training._pretrain(config, alone, torch.device("cpu"), detector, stop, elastic)  # type: ignore[arg-type]
    assert detector.transport_error() == "lost by one and two"
    assert detector.progress is context.progress
    assert not detector.device_is_busy()


def test_nobody_asks_the_groups_once_they_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure detector's thread goes on for a while, and would keep them alive."""
    asked: list[str] = []
    leave_world = launch.leave_world

    def leave(*, failed: bool) -> None:
        asked.append(detector.transport_error())
        leave_world(failed=failed)

    monkeypatch.setattr(launch, "leave_world", leave)
    parallel = parse("--distributed-backend gloo --hetero-heartbeat-timeout 7").parallel
    with joined(Launch(rank=0, world_size=1, local_rank=0), parallel) as (_, detector):
        detector.transport_error = lambda: "what their watchdogs have seen"
    assert asked == [""]
