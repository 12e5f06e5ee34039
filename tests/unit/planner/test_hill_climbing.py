"""Hill climbing: batches divided anew, and covers that no template of the space makes."""

from hetero.planner.cover.cover import Copies, divide_batch, score_cover
from hetero.planner.cover.hill_climbing import HillClimbing
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.replica.boundary_costs import PlacedSlot
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.replica.templates import StageBlock, Template, TemplateFactory
from tests.unit.planner.clusters import cluster, opt_model, problem

QUESTION = problem(cluster(("A100-40", 2, 1), ("V100-16", 4, 1), ("GH200", 2, 1)), opt_model(12, 1024, 16), 16)
OPTIONS = StageOptionTable(QUESTION)
TIERS = SyncTiers(QUESTION)


def one_stage(node_type: int, gpus: int, samples: int) -> Template:
    built = TemplateFactory(QUESTION, OPTIONS).build([StageBlock(node_type, 1, gpus, 1)], samples)
    assert built is not None
    return built


def test_a_faster_replica_gets_more_samples() -> None:
    """Of 64: a GH200 in TF32 is through with its share of 16 before a V100 has done one sample."""
    fast, slow = one_stage(2, 1, 1), one_stage(1, 1, 1)
    cover = divide_batch([(fast, 2), (slow, 4)], 64, 100.0)
    assert cover is not None
    assert sum(copies.microbatches * copies.template.samples for copies in cover) == 64
    assert max(cover[0].shares) > max(cover[1].shares)


def test_samples_that_cannot_be_divided_are_refused() -> None:
    assert divide_batch([(one_stage(2, 2, 2), 1)], 7, 100.0) is None
    assert divide_batch([(one_stage(2, 2, 2), 1)], 8, 100.0) is not None
    assert divide_batch([(one_stage(2, 2, 2), 1)], 8, 0.001) is None


def test_hill_climbing_cuts_a_stage_in_two() -> None:
    """All V100 in one stage is a template of the space; two stages of two of them between other node types is none."""
    slots = [Slot(2, 1, 1), Slot(0, 2, 2), Slot(1, 4, 1), Slot(2, 1, 1)]
    offsets = [0, 0, 0, 1]
    placed_slots = tuple(PlacedSlot(slot, 0, offset) for slot, offset in zip(slots, offsets, strict=True))
    template = TemplateFactory(QUESTION, OPTIONS).balanced(placed_slots, 4)
    assert template is not None
    start = (Copies(template, 1, 4),)
    before = score_cover(start, QUESTION, TIERS)
    cover, after = HillClimbing(QUESTION, OPTIONS, TIERS).climb([(start, before)], Deadline(60, CountedWork()))[0]
    assert after == score_cover(cover, QUESTION, TIERS)
    assert after.step_s < 0.99 * before.step_s
    assert all(
        sum(c.replicas * c.template.devices[node_type.index] for c in cover) <= node_type.num_devices
        for node_type in QUESTION.node_types
    )
    assert sum(c.microbatches * c.template.samples for c in cover) == 16
