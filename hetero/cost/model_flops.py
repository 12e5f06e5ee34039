"""Counts a plan's model FLOPs and what share of the devices' peaks they are: MFU, in which nonsense is seen at once.

    model FLOPs of a step = 3 samples x sum over layers of the operations of a forward (:mod:`.work`)
                          = 72 B s l h^2 (1 + s / 6h + V / 12lh)      for GPT: arXiv 2104.04473, appendix

without the forward that recomputation repeats, attention between all pairs of tokens. MFU (arXiv 2204.02311, app. B) is
that over the seconds of the step times the peak of the devices that work, by their data sheets, in the format of the
products that is assumed: of the precision, TF32 or fp32 in fp32, fp8 of stages in it.

While a stage computes, what it computes again counts too: its hardware utilization does not depend on recomputation,
and can be held against what others have reached (:mod:`.measured_utilization`).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.stage_modules import module_counts, modules_of
from hetero.cost.simulation.simulator import Simulation
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Stage

PASSES_OF_A_STEP = 3
"""Forwards that a forward and a backward are worth: the backward has two products for each one of the forward."""


class Products(NamedTuple):
    """Devices of one type and the number format of their matrix products."""

    device: str
    arithmetic: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """What devices of one type make of their peak under a plan, idle ones not counted.

    mfu: of the whole step.
    computing: hardware utilization while they compute, of the slowest and of the fastest device group.
    num_devices: how many of them work.
    peak_flops_per_s: of one device.
    """

    mfu: float
    computing: tuple[float, float]
    num_devices: int
    peak_flops_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork:
    """What all working devices of one type do in a step of a plan.

    model_flops: floating-point operations of the step on all of them.
    peak_flops_per_s: of one device, ``None`` where no data sheet states it for this format.
    """

    num_devices: int
    model_flops: float
    peak_flops_per_s: float | None

    def flops_per_s(self, step_s: float) -> float:
        """Of one device, in a step of so many seconds."""
        return self.model_flops / (self.num_devices * step_s)

    def mfu(self, step_s: float) -> float | None:
        """Share of the peak."""
        return None if self.peak_flops_per_s is None else self.flops_per_s(step_s) / self.peak_flops_per_s


class _Group(NamedTuple):
    """What a device group does in a step; ``times``: in how many replicas there is one like it."""

    num_devices: int
    times: int
    busy_s: float
    model_flops: float
    hardware_flops: float


def utilizations(simulation: Simulation, costs: CostModel) -> Mapping[Products, Utilization]:
    """The utilization of all device types of the plan in the order in which they come; without those that have no data
    sheet, or none for this format."""
    plan = simulation.plan
    groups: defaultdict[Products, list[_Group]] = defaultdict(list)
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        for numbers in replica.device_groups:
            stages = [replica.stages[s] for s in numbers]
            groups[products_of(stages[0], costs)].append(
                _Group(
                    num_devices=len(stages[0].ranks),
                    times=len(members),
                    busy_s=simulation.stages[members[0], numbers[0]].busy_s,
                    model_flops=replica.num_samples * sum(model_flops(stage, costs) for stage in stages),
                    hardware_flops=replica.num_samples * sum(hardware_flops(stage, costs) for stage in stages),
                )
            )
    found = {}
    for products, alike in groups.items():
        if (peak := _peak(products, costs)) is None:
            continue
        num_devices = sum(group.times * group.num_devices for group in alike)
        computing = [
            group.hardware_flops / (group.busy_s * group.num_devices * peak) for group in alike if group.busy_s
        ]
        found[products] = Utilization(
            mfu=sum(group.times * group.model_flops for group in alike) / (simulation.step_s * num_devices * peak),
            computing=(min(computing, default=0.0), max(computing, default=0.0)),
            num_devices=num_devices,
            peak_flops_per_s=peak,
        )
    return found


def work_of_devices(plan: Plan, costs: CostModel) -> Mapping[Products, DeviceWork]:
    """The work of each device type of ``plan`` in the order in which they come, whatever a step takes."""
    found: dict[Products, DeviceWork] = {}
    for replica in plan.replicas:
        for numbers in replica.device_groups:
            stages = [replica.stages[s] for s in numbers]
            products = _products_without_profile(stages[0], costs)
            before = found.get(products, DeviceWork(num_devices=0, model_flops=0.0, peak_flops_per_s=None))
            found[products] = DeviceWork(
                num_devices=before.num_devices + len(stages[0].ranks),
                model_flops=before.model_flops
                + replica.num_samples * sum(model_flops(stage, costs) for stage in stages),
                peak_flops_per_s=_peak(products, costs),
            )
    return found


def _products_without_profile(stage: Stage, costs: CostModel) -> Products:
    """The same as :func:`products_of`, for devices that nobody has measured, too: in fp32 theirs are in fp32."""
    try:
        return products_of(stage, costs)
    except ConfigError:
        return Products(stage.device, costs.precision)


def overall_mfu(found: Mapping[Products, Utilization]) -> float:
    """MFU of all of these devices together: the mean by their peaks."""
    peak = sum(each.num_devices * each.peak_flops_per_s for each in found.values())
    return sum(each.mfu * each.num_devices * each.peak_flops_per_s for each in found.values()) / peak


def products_of(stage: Stage, costs: CostModel) -> Products:
    """On what devices and in what format a stage multiplies."""
    if stage.fp8:
        return Products(stage.device, "fp8")
    return Products(stage.device, costs.arithmetic_of(stage.device) if costs.precision == "fp32" else costs.precision)


def model_flops(stage: Stage, costs: CostModel) -> float:
    """Floating-point operations of one sample's forward and backward on all ranks of a stage together."""
    counts = module_counts(stage.start, stage.end, num_layers=costs.model.num_layers)
    works = ((count, costs.work(kind, tp=1, micro_batch_size=1)) for kind, count in counts.items())
    return PASSES_OF_A_STEP * sum(count * work.operations for count, work in works)


def hardware_flops(stage: Stage, costs: CostModel) -> float:
    """The same with what recomputation computes again."""
    again = 0.0
    if stage.recompute != "none":
        modules = modules_of(stage.start, stage.end)
        for kind in modules[: stage.recompute_num_layers or len(modules)]:
            work = costs.work(kind, tp=1, micro_batch_size=1)
            again += work.operations if stage.recompute == "full" else work.attention_operations
    return model_flops(stage, costs) + again


def _peak(products: Products, costs: CostModel) -> float | None:
    """Operations per second of one device, ``None`` where nobody states them."""
    sheet = costs.device_types.of(products.device).data_sheet
    try:
        return None if sheet is None else sheet.flops_per_s(products.arithmetic)
    except ConfigError:
        return None
