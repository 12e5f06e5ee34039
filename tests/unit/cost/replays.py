"""Pipelines for the replay, in few words."""

from hetero.cost.network import TransferCost
from hetero.cost.simulation.engine import Pipeline, Span
from hetero.schedule.actions import Schedule


def cost(seconds: float, **ports: float) -> TransferCost:
    """``out_0=2.0``: the outgoing side of node 0's interface is busy for two seconds."""
    named = tuple((("out" if name[0] == "o" else "in", int(name[-1]), 0), busy_s) for name, busy_s in ports.items())
    return TransferCost(seconds=seconds, ports=named, num_bytes=0)


def pipeline(
    rows: Schedule,
    *,
    counts: tuple[int, ...],
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    weight_s: tuple[float, ...] = (),
    transfers: tuple[TransferCost, ...] = (),
) -> Pipeline:
    slices = tuple(({(0, 0): each},) for each in transfers)
    return Pipeline(
        rows=rows,
        num_microbatches=counts,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        forward=slices,
        backward=slices,
    )


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {f"{span.stage}{span.kind}{span.number}": (span.start_s, span.end_s) for span in spans}
