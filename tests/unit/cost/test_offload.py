"""Bytes and seconds of what goes to the host, by hand and by replay."""

import dataclasses
import random
from typing import Any

import pytest

from hetero.cost.cost_model import CostModel, StageConfig
from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.offload.blocks import (
    CHOICES,
    BlockChoice,
    ElementBytes,
    OffloadBlock,
    OffloadChoice,
    OffloadStage,
    offload_blocks,
    other_bytes,
)
from hetero.cost.offload.host_rates import host_rates
from hetero.cost.offload.host_resources import HostResources
from hetero.cost.offload.offloaded_step import OffloadedStage, offloaded_step
from hetero.cost.stage_memory import stage_memory
from hetero.errors import ConfigError
from hetero.spec.cluster import NodeType
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

BF16 = ElementBytes(weight=2, gradient=4, device_state=12, host_state=12)
LAYER = OffloadBlock(
    kind="block",
    parameters=10**6,
    largest=4 * 10**5,
    saved_bytes=5 * 10**6,
    recomputed_bytes=10**6,
    forward_s=0.010,
    backward_s=0.020,
    recompute_s=0.010,
    update_s=0.001,
)
HOST = HostResources(
    memory_bytes=10**9,
    threads=4,
    elements_per_s=4e8,
    to_device=Link(bandwidth_gb_per_s=1.0, latency_us=0),
    to_host=Link(bandwidth_gb_per_s=2.0, latency_us=0),
    added_bytes_per_s=4e9,
    preview_factor=2.0,
    stages_checkpoints=False,
)
"""A million parameters in 2.5 ms by four threads, a megabyte in 1 ms to the device and in 0.5 ms from it."""

OPTIMIZER = BlockChoice(optimizer=True)
GRADIENTS = BlockChoice(optimizer=True, gradients=True)
WEIGHTS = BlockChoice(optimizer=True, gradients=True, weights=True)
ACTIVATIONS = BlockChoice(activations=True)
RECOMPUTE = BlockChoice(recompute=True)
KEPT = BlockChoice()


def stage_of(blocks: tuple[OffloadBlock, ...], **changes: Any) -> OffloadStage:
    return OffloadStage(**{"blocks": blocks, "element_bytes": BF16, "in_flight": 2, "capacity_bytes": 10**9, **changes})


def priced(
    choices: tuple[BlockChoice, ...],
    *,
    blocks: tuple[OffloadBlock, ...] | None = None,
    microbatches: int = 8,
    host: HostResources = HOST,
    speculate: bool = False,
    norm_s: float = 0.0,
    **changes: Any,
) -> OffloadedStage:
    """One stage of such layers, alone on a host, four threads."""
    stage = stage_of(blocks or (LAYER,) * len(choices), **changes)
    question = OffloadQuestion(stages=(stage,), host=host, num_microbatches=microbatches, norm_s=norm_s)
    choice = OffloadChoice(blocks=choices, speculate=speculate, threads=4 // stage.num_ranks)
    return offloaded_step(question, [choice]).stages[0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_device_that_keeps_everything_holds_what_the_memory_model_says(precision: str) -> None:
    model = gpt2_model()
    costs: CostModel = cost_model(model, [profile(model, precision=precision)], precision=precision)
    config = StageConfig("A100-40", 0, 2, 2, 2)
    memory = stage_memory(costs, config, optimizer_ways=2)
    stage = OffloadStage(
        blocks=offload_blocks(costs, config, optimizer_ways=2),
        element_bytes=ElementBytes.of(costs),
        in_flight=3,
        capacity_bytes=0,
        other_bytes=other_bytes(memory),
        allocator_slack=memory.allocator_slack,
    )
    assert [block.kind for block in stage.blocks] == ["embedding", "block", "block"]
    question = OffloadQuestion(stages=(stage,), host=HOST, num_microbatches=8)
    found = offloaded_step(question, [OffloadChoice.nothing(stage)]).stages[0]
    # Slack and shares of the optimizer's state are rounded block by block.
    assert found.device_bytes == pytest.approx(memory.at(3).total, abs=8)
    assert found.host_bytes == 0
    seconds = costs.stage(config)
    assert found.microbatch_s == pytest.approx(seconds.microbatch_s)


def test_bytes_of_a_device() -> None:
    """A million parameters: 2 MB of weights, 4 of gradients, 12 of state; 5 MB of activations, 2 in flight."""
    kept = 2 + 4 + 12 + 2 * 5
    four = (LAYER,) * 4
    assert priced((KEPT,) * 4, blocks=four).device_bytes == 4 * kept * 10**6
    assert priced((OPTIMIZER,) * 4, blocks=four).device_bytes == 4 * (kept - 12) * 10**6
    assert priced((GRADIENTS,) * 4, blocks=four).device_bytes == (4 * (kept - 16) + 2 * 2 + 0.8) * 10**6
    summed = priced((GRADIENTS,) * 4, blocks=four, bucket_bytes=10**6)
    assert summed.device_bytes == (4 * (kept - 16) + 2 * 2 + 0.8 + 1) * 10**6
    assert priced((KEPT,) * 4, blocks=four, bucket_bytes=10**6).device_bytes == 4 * kept * 10**6
    assert priced((WEIGHTS,) * 4, blocks=four).device_bytes == (4 * 2 * 5 + 2 * 2 + 0.8 + 2 * 2) * 10**6
    assert priced((ACTIVATIONS,) * 4, blocks=four).device_bytes == (4 * (kept - 10) + 4 * 5) * 10**6
    assert priced((RECOMPUTE,) * 4, blocks=four).device_bytes == (4 * (kept - 2 * 4) + 5) * 10**6


def test_bytes_of_a_host() -> None:
    """Of a rank with half of the optimizer's state."""
    half = dataclasses.replace(LAYER, ways=2.0)

    def host_mb(choice: BlockChoice, **changes: Any) -> float:
        return priced((choice,), blocks=(half,), **changes).host_bytes / 10**6

    assert host_mb(KEPT) == 0
    assert host_mb(OPTIMIZER) == (12 + 4 + 2) / 2
    assert host_mb(OPTIMIZER, speculate=True) == (12 + 12 + 4 + 2) / 2
    assert host_mb(GRADIENTS) == 6 + 4 + 1 + 1.6
    assert host_mb(GRADIENTS, microbatches=1) == host_mb(GRADIENTS)
    assert host_mb(WEIGHTS) == 6 + 4 + 2 + 1.6
    assert host_mb(ACTIVATIONS) == 2 * 5
    assert host_mb(ACTIVATIONS, microbatches=1) == 5
    staged = dataclasses.replace(HOST, stages_checkpoints=True)
    assert host_mb(KEPT, host=staged) == 0
    assert host_mb(OPTIMIZER, host=staged) == (12 + 12 + 4 + 2) / 2


def test_what_one_rank_holds_alone_is_updated_where_it_is() -> None:
    """A microbatch's gradients go out in the precision of weights; of a step nothing comes or goes beside."""
    found = priced((WEIGHTS, GRADIENTS))
    assert (found.per_microbatch.to_host, found.per_microbatch.to_device) == (2 * 2 * 10**6, 2 * 2 * 10**6)
    assert (found.per_step.to_host, found.per_step.to_device) == (0, 2 * 10**6)


def test_what_several_own_is_summed_and_gathered_on_the_devices() -> None:
    half = dataclasses.replace(LAYER, ways=2.0)
    found = priced((WEIGHTS,), blocks=(half,))
    assert found.per_microbatch.to_device == 2 * 2 * 10**6
    # The rank's part of the sums goes out, and what the other one has updated; all sums come in, and its own weights.
    assert found.per_step.to_host == (2 + 1) * 10**6
    assert found.per_step.to_device == (4 + 1) * 10**6


def test_an_embedding_is_streamed_for_its_forward_alone() -> None:
    embedding = dataclasses.replace(LAYER, kind="embedding", recomputed_bytes=None, backward_reads=0)
    found = priced((WEIGHTS,), blocks=(embedding,))
    assert found.per_microbatch.to_device == 2 * 10**6
    assert len(embedding.choices) == 8
    assert len(LAYER.choices) == len(CHOICES) == 12


def test_copies_fit_beside_a_pass_or_it_takes_longer() -> None:
    """40 MB of activations need 20 ms out and 40 ms in; a forward takes 10 ms, a backward 20."""
    fat = dataclasses.replace(LAYER, saved_bytes=40 * 10**6)
    found = priced((ACTIVATIONS, ACTIVATIONS), blocks=(fat, fat), in_flight=4)
    assert found.forward_s == pytest.approx(0.040)
    assert found.backward_s == pytest.approx(0.080)
    assert found.turn_s == 0
    # Beside the whole period of 60 ms they would seem to fit: 40 ms out, 80 in.
    slow_sum = dataclasses.replace(HOST, added_bytes_per_s=1e8)
    assert priced((GRADIENTS,), host=slow_sum).backward_s == pytest.approx(0.001 + 4e6 / 1e8)


def test_activations_of_one_microbatch_in_flight_have_no_time_in_the_last_block() -> None:
    """5 MB: 2.5 ms out, 5 ms in. The block before the last has 30 ms for that."""
    assert priced((KEPT, ACTIVATIONS), in_flight=1).turn_s == pytest.approx(0.0075)
    assert priced((ACTIVATIONS, KEPT), in_flight=1).turn_s == 0
    assert priced((KEPT, ACTIVATIONS), in_flight=2).turn_s == 0


def test_after_the_norm_blocks_are_updated_in_the_order_of_their_need() -> None:
    """Updates take 2.5 ms each, their weights 2 ms; block j is needed 10 j ms after the forward began."""
    found = priced((OPTIMIZER,) * 3, norm_s=0.1, drain_s=1.0)
    assert found.updates_s == pytest.approx([0.0025] * 3)
    assert found.wait_s == pytest.approx(0.1 + 0.0025)
    assert priced((KEPT,) * 3, norm_s=0.1).wait_s == pytest.approx(0.1 + 3 * 0.001)
    # The embedding is the first that is needed: on the host it is what everybody waits for.
    large = dataclasses.replace(LAYER, parameters=10**7)
    first, last = ((large, LAYER, LAYER), (LAYER, LAYER, large))
    assert priced((OPTIMIZER,) * 3, blocks=first, drain_s=1.0, norm_s=0.1).wait_s == pytest.approx(0.125)
    assert priced((OPTIMIZER,) * 3, blocks=last, drain_s=1.0, norm_s=0.1).wait_s == pytest.approx(0.130 - 0.020)


def test_previews_run_beside_the_last_backward() -> None:
    """A late stage ends early; its previews are done before the norm is known, which then is all that it waits for."""
    after = priced((OPTIMIZER,) * 3, norm_s=0.005, drain_s=0.0)
    beside = priced((OPTIMIZER,) * 3, norm_s=0.005, drain_s=0.0, speculate=True)
    # The first block's gradient is the last one there, 2 ms after the backward; its preview takes 5 ms.
    assert after.wait_s == pytest.approx(0.005 + 0.0025)
    assert beside.wait_s == pytest.approx(0.002 + 0.005)
    assert priced((OPTIMIZER,) * 3, norm_s=0.005, drain_s=0.3, speculate=True).wait_s == pytest.approx(0.005)


def test_the_norm_waits_for_sums_on_the_host() -> None:
    """The first block's gradients are there 1 ms of the copy and 1 of the adding after the backward; its update takes
    2.5 ms, and its weights 2 ms: to the device, or from where they live to the first forward."""
    found = priced((GRADIENTS,) * 3, norm_s=0.1)
    assert found.wait_s == pytest.approx(0.1 + 0.002 + 0.0025)
    assert priced((WEIGHTS,) * 3, norm_s=0.1).wait_s == pytest.approx(0.1 + 0.002 + 0.0025 + 0.002)
    kept_last = priced((KEPT, GRADIENTS, GRADIENTS), norm_s=0.1)
    # They are long there: what is left is the update of the block that stays.
    assert kept_last.wait_s == pytest.approx(0.1 + 0.001)


def test_what_recomputes_has_its_gradients_earlier_before_the_end() -> None:
    """The second block's is there 20 ms before the end, or 30; its preview takes 50 ms, and it is needed after 10."""
    large = dataclasses.replace(LAYER, parameters=10**7)
    kept, again = (
        priced((first, OPTIMIZER), blocks=(LAYER, large), speculate=True, norm_s=-1.0) for first in (KEPT, RECOMPUTE)
    )
    assert kept.wait_s == pytest.approx(-0.020 + 0.020 + 0.050 - 0.010)
    assert again.wait_s == pytest.approx(kept.wait_s - 0.010)


def interrupted(starts: list[int], work: list[int], needs: list[int]) -> int:
    """The most lateness when at each moment the block works that is needed first of those that have started."""
    left, now, late = list(work), min(starts), -(10**9)
    while any(left):
        there = [j for j, start in enumerate(starts) if left[j] and start <= now]
        if there:
            j = min(there, key=lambda each: needs[each])
            left[j] -= 1
            if left[j] == 0:
                late = max(late, now + 1 - needs[j])
        now += 1
    return late


def test_the_wait_is_that_of_the_order_by_need() -> None:
    """The closed form against a replay, in ms: random updates, forwards, backwards, previews."""
    draw = random.Random(0)
    instant = Link(bandwidth_gb_per_s=10**6, latency_us=0)
    host = dataclasses.replace(HOST, to_device=instant, to_host=instant, preview_factor=1.0)
    for _ in range(60):
        blocks = tuple(
            dataclasses.replace(
                LAYER,
                parameters=4 * 10**5 * draw.randint(1, 60),
                forward_s=draw.randint(0, 20) / 1e3,
                backward_s=draw.randint(0, 20) / 1e3,
            )
            for _ in range(draw.randint(1, 6))
        )
        found = priced((OPTIMIZER,) * len(blocks), blocks=blocks, host=host, speculate=True, norm_s=-10.0)
        starts = [-round(1e3 * sum(each.backward_s for each in blocks[:j])) for j in range(len(blocks))]
        needs = [round(1e3 * sum(each.forward_s for each in blocks[:j])) for j in range(len(blocks))]
        work = [each.parameters // (4 * 10**5) for each in blocks]
        assert found.wait_s * 1e3 == pytest.approx(interrupted(starts, work, needs), abs=0.1)


def test_cards_of_a_switch_share_its_link() -> None:
    def period_s(*cards: tuple[int, ...]) -> float:
        stages = tuple(
            stage_of((dataclasses.replace(LAYER, saved_bytes=9 * 10**6),) * 2, cards=each, in_flight=4)
            for each in cards
        )
        question = OffloadQuestion(stages=stages, host=HOST, num_microbatches=8)
        choice = OffloadChoice(blocks=(ACTIVATIONS, ACTIVATIONS))
        return offloaded_step(question, [choice] * len(stages)).period_s

    assert period_s((1, 0)) == period_s((1, 0), (0, 1)) == pytest.approx(0.060)
    assert period_s((1, 0), (2, 0)) == period_s((3, 0), (0, 1)) == pytest.approx(0.060)
    assert period_s((1, 0), (3, 0)) == period_s((4, 0)) == pytest.approx(4 * 2 * 0.009)


def described_host(**changes: Any) -> HostProfile:
    link = Link(bandwidth_gb_per_s=20.0, latency_us=10.0)
    rates = (UpdateRate(threads=1, elements_per_s=2e8), UpdateRate(threads=8, elements_per_s=1e9))
    fields = {"updates": rates, "memory_copy_gb_per_s": 30.0, "to_device": link, "to_host": link, **changes}
    return HostProfile(source="a test", memory_gib=64, **fields)


def described_node(**changes: Any) -> NodeType:
    link = Link(bandwidth_gb_per_s=12.0, latency_us=20.0)
    return NodeType(name="desk", device="A100-40", gpus_per_node=4, inside_node=link, host=described_host(**changes))


def test_some_ranks_have_what_each_of_all_gets() -> None:
    rates = host_rates(described_node(gpus_per_switch=2))
    part = HostResources.of_ranks(3, rates, memory_bytes=1)
    assert (rates.threads, part.threads) == (2, 6)
    assert part.elements_per_s == pytest.approx(0.75 * 1e9)
    # Of six threads one takes as long as one of the two that a rank has.
    assert part.update_thread_s(10**6) / 2 == pytest.approx(rates.update_s(10**6)) == pytest.approx(0.004)
    assert part.sum_s(10**9) == rates.sum_s(10**9) == pytest.approx(1.5 * 4 / 30)
    # The ranks behind a switch are in the question, and share its link there.
    assert part.copy_s(part.to_host, 10**9) == pytest.approx(10e-6 + 0.05)
    assert rates.out_s(10**9) == pytest.approx(10e-6 + 0.1)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (BlockChoice(weights=True), "block 0 .block. has weights; weights on the host need gradients there"),
        (BlockChoice(gradients=True), "has gradients"),
        (BlockChoice(activations=True, recompute=True), "has activations, recompute; .* not computed again as well"),
    ],
)
def test_what_is_not_legal_is_refused(choice: BlockChoice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        priced((choice,))


def test_questions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 blocks: 2 choices"):
        priced((KEPT, KEPT), blocks=(LAYER,))
    with pytest.raises(ConfigError, match="no blocks"):
        stage_of(())
    with pytest.raises(ConfigError, match="num_microbatches is 0"):
        priced((KEPT,), microbatches=0)
    with pytest.raises(ConfigError, match="4 threads for updates of 5 ranks"):
        OffloadQuestion(stages=(stage_of((LAYER,), cards=(5,)),), host=HOST, num_microbatches=1)
    with pytest.raises(ConfigError, match="it has recompute full"):
        offload_blocks(cost_model(gpt2_model(), []), StageConfig("A100-40", 0, 1, 1, 1, recompute="full"))
