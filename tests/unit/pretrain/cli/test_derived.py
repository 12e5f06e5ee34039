"""Values that follow from several flags."""

from pathlib import Path

import pytest
import torch

from hetero.distributed.failure_detector import FailureDetectorOptions
from megatron.pretrain.cli.derived import default_backend
from tests.helpers.flags import MOE, parse


def test_gated_mlp_is_megatrons_two_thirds_down_to_a_multiple_of_64() -> None:
    assert parse("--swiglu --hidden-size 4096 --num-attention-heads 32").model.ffn_hidden_size == 10_880
    assert parse("--swiglu --ffn-hidden-size 7").model.ffn_hidden_size == 7


def test_experts_are_as_wide_as_the_mlp_unless_told() -> None:
    assert parse(MOE, "--ffn-hidden-size 80").model.moe_ffn_hidden_size == 80


def test_a_plan_replaces_the_uniform_plans_flags() -> None:
    parallel = parse("--hetero-plan plan.json", without="--micro-batch-size").parallel
    assert parallel.hetero_plan == Path("plan.json")
    assert parallel.micro_batch_size is None


def test_planning_at_start_needs_a_cluster_and_no_plan_file() -> None:
    without = "--micro-batch-size"
    for flags in ("--hetero-cluster c.yaml", "--hetero-cluster c.yaml --hetero-plan auto"):
        parallel = parse(flags, without=without).parallel
        assert parallel.hetero_plan is None
        assert parallel.planner is not None
        assert parallel.planner.cluster == parallel.hetero_cluster == Path("c.yaml")
    checked = parse("--hetero-cluster c.yaml --hetero-plan a.json", without=without).parallel
    assert checked.planner is None
    assert checked.hetero_cluster == Path("c.yaml")


def test_an_emulated_cluster_is_planned_for_like_a_real_one() -> None:
    without = "--micro-batch-size"
    config = parse("--hetero-emulate c.yaml --hetero-profile p.json", without=without)
    assert config.parallel.hetero_cluster == Path("c.yaml")
    assert config.parallel.planner is not None
    assert config.parallel.planner.cluster == Path("c.yaml")
    assert config.parallel.backend == "gloo"
    assert config.emulation is not None
    assert config.emulation.profiles == (Path("p.json"),)
    with_plan = parse("--hetero-emulate c.yaml --hetero-plan a.json --hetero-data-sheets", without=without)
    assert with_plan.parallel.planner is None
    assert with_plan.emulation is not None
    assert with_plan.emulation.data_sheets


def test_sample_counts_become_steps() -> None:
    by_samples = parse("--train-samples 800 --lr-warmup-samples 80", without="--train-iters")
    assert by_samples == parse("--lr-warmup-iters 10")


def test_gpt2s_files_alone_choose_its_tokenizer() -> None:
    assert parse("--vocab-file v --merge-file m", without="--tokenizer-type").data.tokenizer_type == "GPT2BPETokenizer"


def test_a_fraction_of_warmup_is_handed_on() -> None:
    optimizer = parse("--lr-warmup-fraction 0.25").optimizer
    assert (optimizer.lr_warmup_fraction, optimizer.lr_warmup_samples) == (0.25, 0)


@pytest.mark.parametrize(("cuda", "backend"), [(True, "nccl"), (False, "gloo")])
def test_backend_follows_cuda(cuda: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert default_backend() == backend
    assert parse(without="--distributed-backend").parallel.backend == backend


def test_a_rank_is_lost_after_as_long_as_the_failure_detector_says() -> None:
    """The flag's default is typed again: flags are read without torch, which the detector imports."""
    assert parse().parallel.heartbeat_timeout_s == FailureDetectorOptions().lost_after_s
