"""How far a prediction may be off, in words: its range, its order among other plans, what to measure, and MFU."""

from collections.abc import Callable, Iterator, Mapping

from hetero.cost.measured_utilization import utilization_warnings
from hetero.cost.model_flops import Products, Utilization, overall_mfu
from hetero.cost.prediction_range import StepRange
from hetero.cost.wanted_profile import WantedProfile
from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.planner.certainty import Certainty, Measurement, Rival
from hetero.report.plan_wording import range_of
from hetero.units import TERA

LINKS_COMMAND = (
    f"torchrun --nnodes NODES --rdzv-backend {RENDEZVOUS} --rdzv-endpoint FIRST_NODE:PORT --rdzv-conf {NODE_RANK}=NODE "
    "--nproc-per-node gpu -m hetero doctor --link-seconds 60"
)
"""What measures links, on every node."""

MOST_TIMES = 1000
"""Ratios up to which a number is printed: next to a plan that costs nothing any other is millions of times as dear."""

CommandsOf = Callable[[WantedProfile], tuple[str, ...]]
"""What measures a profile, and what asks the same again with it."""


def certainty_lines(certainty: Certainty, commands_of: CommandsOf) -> Iterator[str]:
    """The range, how the plan stands against others, and the measurements that would narrow the range most."""
    yield f"nine of ten such steps take {range_of(certainty.step)} s"
    for rival in certainty.rivals:
        yield rival_in_words(rival)
    if certainty.measurements:
        yield "what would narrow the range most:"
    for number, measurement in enumerate(certainty.measurements, start=1):
        yield f"  {number}. {narrows(measurement, certainty.step)}"
        for command in commands_for(measurement, commands_of):
            yield f"     {command}"


def rival_in_words(rival: Rival) -> str:
    """How the plan stands against another one, and whether that is certain."""
    times = f"{rival.ratio:.3f}x" if rival.ratio < MOST_TIMES else f"more than {MOST_TIMES}x"
    said = f"against {rival.name}: {times}"
    if rival.is_certain:
        return f"{said}, certain from {rival.certain_from:.3f}x on"
    return f"{said}, which cannot be told apart below {rival.certain_from:.3f}x: run both, or measure"


def narrows(measurement: Measurement, step: StepRange) -> str:
    """What to measure, and what becomes of the range."""
    return f"{measurement.what}: {range_of(step)} s becomes {range_of(measurement.settled)} s"


def commands_for(measurement: Measurement, commands_of: CommandsOf) -> tuple[str, ...]:
    """What to type: what measures, and for a profile of layers what takes it."""
    return (LINKS_COMMAND,) if measurement.profile is None else commands_of(measurement.profile)


def every_command(certainty: Certainty, commands_of: CommandsOf) -> tuple[tuple[str, ...], ...]:
    """What to type for each measurement of ``certainty``."""
    return tuple(commands_for(measurement, commands_of) for measurement in certainty.measurements)


def utilization_lines(found: Mapping[Products, Utilization]) -> Iterator[str]:
    """MFU of every device type, and warnings where nobody has measured the like."""
    if found:
        each = "; ".join(utilization_in_words(products, one) for products, one in found.items())
        yield f"MFU {overall_mfu(found):z.1%}: {each}"
    for warning in utilization_warnings(found):
        yield f"warning: {warning}"


def utilization_in_words(products: Products, found: Utilization) -> str:
    """``A100-40 41.2% of 156 TFLOP/s in tf32, 45 to 52% while computing``."""
    low, high = (f"{share:z.0%}" for share in found.computing)
    computing = high if low == high else f"{low.removesuffix('%')} to {high}"
    return (
        f"{products.device} {found.mfu:z.1%} of {found.peak_flops_per_s / TERA:.4g} TFLOP/s in {products.arithmetic}, "
        f"{computing} while computing"
    )
