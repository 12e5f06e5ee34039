"""Where the seconds of offloaded steps are, and the best that positions can say of one stage beside a host.

    python -m tests.bench.bench_offload_account                     accounts of policies and of the best positions
    python -m tests.bench.bench_offload_account --batches 4 --execute
    python -m tests.bench.bench_offload_account --rates             the ratio to ZeRO-Offload's policy by host rates

The machine, the model and the policies are those of :mod:`tests.bench.bench_offload`, whose assumed host rates
``--rates`` changes. All seconds are the simulator's. The best positions are looked for here by other means than the
planner's: all of a grid of recomputed layers, of activations and weights on the host, of gradients there or not, and of
previews or not, for every microbatch, each with as much optimizer state on the device as has room; then by single
layers from the three best of them until nothing helps. So it is the best of the grid, and of its neighbours.
"""

import argparse
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence

warnings.filterwarnings("ignore")

from hetero.runtime import cpu_backend  # noqa: E402

cpu_backend.install()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from hetero.cost.cost_model import CostModel, StageConfig  # noqa: E402
from hetero.cost.memory import plan_memory  # noqa: E402
from hetero.cost.offload.host_rates import host_rates  # noqa: E402
from hetero.cost.simulation.simulator import simulate  # noqa: E402
from hetero.errors import ConfigError, PlanError  # noqa: E402
from hetero.plan.ir import Plan, Recompute, Stage  # noqa: E402
from hetero.plan.offload import Offload, gradients_on_host, updates_on_host, weights_on_host  # noqa: E402
from hetero.planner.deadline import CountedWork, Deadline  # noqa: E402
from hetero.planner.listed.listed_plans import best_plan  # noqa: E402
from hetero.planner.listed.offload_policies import POLICIES  # noqa: E402
from hetero.planner.problem import Problem  # noqa: E402
from hetero.planner.scoring import bytes_over_capacity, score_plan  # noqa: E402
from hetero.spec.cluster import ClusterSpec  # noqa: E402
from hetero.spec.host import HostProfile, UpdateRate  # noqa: E402
from hetero.spec.link import Link  # noqa: E402
from hetero.spec.parameters import parameters  # noqa: E402
from tests.bench.bench_offload import (  # noqa: E402
    BATCHES,
    RATES,
    SEQ_LENGTH,
    clusters,
    costs_of,
    executed_s,
    problem,
    with_rates,
)

OTHERS = tuple(name for name in POLICIES if name != "zero-offload")
ATTENTION = -1
"""In place of a number of layers that are computed again: of all layers the inside of attention."""

AT_ONCE = 1e6
"""So many times as fast as described is as good as at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """What a stage of all layers says: numbers of first layers computed again (or attention in all of them) and whose
    activations are on the host, and of last ones whose state, gradients and weights are there."""

    size: int
    again: int = 0
    activations: int = 0
    state: int = 0
    gradients: int = 0
    weights: int = 0
    speculate: bool = False

    @property
    def recompute(self) -> Recompute:
        return "selective" if self.again == ATTENTION else "full" if self.again else "none"

    def in_words(self) -> str:
        counts = ("again", "activations", "state", "gradients", "weights")
        said = [f"{count} {name}" for name in counts if (count := getattr(self, name)) > 0]
        return ", ".join(
            [str(self.size), *["attention again"] * (self.again == ATTENTION), *said, *["previews"] * self.speculate]
        )

    def plan(self, start: Plan) -> Plan:
        num_layers = start.model.num_layers

        def first(count: int) -> float | None:
            return None if not count else -1.0 if count == num_layers else float(num_layers - count)

        offload = Offload(
            optimizer_from=first(self.state),
            gradients_from=first(self.gradients),
            weights_from=first(self.weights),
            speculate=self.speculate and self.state > 0,
            activations_until=self.activations - 1.0 if self.activations else None,
        )
        changed = start.replicas[0].with_stage(
            0,
            micro_batch_size=self.size,
            in_flight=1,
            recompute=self.recompute,
            recompute_num_layers=self.again if 0 < self.again < num_layers else None,
            offload=offload,
        )
        return start.with_replica(0, changed)


class Search:
    """The best positions of one stage."""

    def __init__(self, problem: Problem, *, step: int, previews: bool = True) -> None:
        self.problem, self.step, self.previews = problem, step, previews
        self.start = everything(problem)
        self.num_layers = problem.model.num_layers
        self.seconds: dict[Positions, float | None] = {}

    def best(self) -> tuple[float, Positions]:
        ranked = sorted(self._grid(), key=self._compute_s)
        found: list[tuple[float, Positions]] = []
        least_s = float("inf")
        for each in ranked:
            if self._compute_s(each) >= least_s:
                break
            made = self._with_most_state_on_device(each)
            if made is not None and (seconds := self._step_s(made)) is not None:
                found.append((seconds, made))
                least_s = min(least_s, seconds)
        found.sort(key=lambda each: each[0])
        return min((self._refined(*each) for each in found[:3]), key=lambda each: each[0])

    def _grid(self) -> Iterator[Positions]:
        batch, counts = self.problem.global_batch_size, (ATTENTION, *range(0, self.num_layers + 1, self.step))
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if batch % size == 0]
        parts = [self.num_layers * part // 4 for part in range(5)]
        # With gradients on the host, which a 1 asks for, weights may be there.
        held = [(0, 0), *((1, weights) for weights in parts)]
        for size, again, out, (gradients, weights), speculate in itertools.product(
            sizes, counts, (0, parts[2], parts[4]), held, (False, True)[: 1 + self.previews]
        ):
            yield Positions(
                size=size, again=again, activations=out, gradients=gradients, weights=weights, speculate=speculate
            )

    def _compute_s(self, at: Positions) -> float:
        """Seconds of the device's computes alone, a lower bound."""
        config = StageConfig(
            self.problem.node_types[0].device,
            0,
            self.num_layers,
            1,
            at.size,
            recompute=at.recompute,
            recompute_num_layers=at.again if at.recompute == "full" else None,
        )
        return self.problem.global_batch_size // at.size * self.problem.costs.stage(config).microbatch_s

    def _with_most_state_on_device(self, at: Positions) -> Positions | None:
        """``at`` with the fewest layers' state on the host, and their gradients where it asks for them."""
        low, high = at.weights, self.num_layers
        made = [
            dataclasses.replace(at, state=count, gradients=count if at.gradients else 0) for count in range(high + 1)
        ]
        if not self._fits(made[high]):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(made[middle]) else (middle + 1, high)
        return made[low]

    def _fits(self, at: Positions) -> bool:
        plan = at.plan(self.start)
        return not bytes_over_capacity(plan, self.problem, plan_memory(plan, self.problem.costs))

    def _step_s(self, at: Positions) -> float | None:
        if at not in self.seconds:
            try:
                found = score_plan(at.plan(self.start), self.problem)
            except (PlanError, ConfigError):
                found = None
            self.seconds[at] = found.step_s if found is not None else None
        return self.seconds[at]

    def _refined(self, seconds: float, at: Positions) -> tuple[float, Positions]:
        improved = True
        while improved:
            improved = False
            for each in self._neighbours(at):
                taken = self._step_s(each)
                if taken is not None and taken < seconds - 1e-6:
                    seconds, at, improved = taken, each, True
        return seconds, at

    def _neighbours(self, at: Positions) -> Iterator[Positions]:
        moves = [(0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1), (-4, 4), (4, -4), (-4, 1), (-2, 1)]
        for (again, state), gradients, weights, out in itertools.product(
            moves, (-2, 0, 1) if at.gradients else (0,), (-1, 0, 1) if at.weights else (0,), (0, -2, 2)
        ):
            kept = at.state + state
            held = min(kept, max(0, at.gradients + state + gradients)) if at.gradients else 0
            changed = dataclasses.replace(
                at,
                again=at.again + again,
                state=kept,
                gradients=held,
                weights=max(0, min(held, at.weights + weights)) if at.weights else 0,
                activations=at.activations + out,
            )
            counts = (changed.again, changed.state, changed.gradients, changed.weights, changed.activations)
            if all(0 <= count <= self.num_layers for count in counts):
                yield changed
        if self.previews:
            yield dataclasses.replace(at, speculate=not at.speculate)


def account(plan: Plan, cluster: ClusterSpec, costs: CostModel) -> dict[str, float]:
    """Seconds of a plan of one stage: of its step, of what its device and its host do of it, each alone, and of the
    step if copies or host updates took no time."""
    stage, model = plan.replicas[0].stages[0], plan.model
    node_type = cluster.node_types[0]
    rates = host_rates(node_type)
    microbatches = plan.replicas[0].num_microbatches(0)

    def compute(recomputes: bool) -> float:
        config = StageConfig(
            stage.device,
            0,
            model.num_layers,
            1,
            stage.micro_batch_size,
            recompute=stage.recompute if recomputes else "none",
            recompute_num_layers=stage.recompute_num_layers if recomputes else None,
        )
        return microbatches * costs.stage(config).microbatch_s

    def numel(where: Callable[[float, Sequence[Stage]], bool]) -> int:
        return sum(each.numel for each in parameters(model) if where(each.position, [stage]))

    updated, added, kept = numel(updates_on_host), numel(gradients_on_host), numel(weights_on_host)
    all_of_it = sum(each.numel for each in parameters(model))
    update_s = costs.stage(StageConfig(stage.device, 0, model.num_layers, 1, 1)).update_s
    out = costs.gradient_bytes * (updated - added) + costs.element_bytes * microbatches * added
    back = costs.element_bytes * (updated - kept + 2 * microbatches * kept)
    host = node_type.host
    assert host is not None
    at_once = dataclasses.replace(
        host,
        to_host=Link(bandwidth_gb_per_s=24 * AT_ONCE, latency_us=0),
        to_device=Link(bandwidth_gb_per_s=24 * AT_ONCE, latency_us=0),
    )
    updated_at_once = dataclasses.replace(
        host,
        updates=tuple(UpdateRate(threads=r.threads, elements_per_s=r.elements_per_s * AT_ONCE) for r in host.updates),
    )

    def beside(other: HostProfile) -> float:
        changed = dataclasses.replace(cluster, node_types=(dataclasses.replace(node_type, host=other),))
        return simulate(plan, changed, costs).step_s

    return {
        "step": simulate(plan, cluster, costs).step_s,
        "forward + backward": compute(recomputes=False),
        "again": compute(recomputes=True) - compute(recomputes=False),
        "device updates": update_s * (1 - updated / all_of_it),
        "host updates": rates.update_s(updated),
        "gradients out": rates.out_s(out),
        "weights in": rates.in_s(back),
        "step, copies at once": beside(at_once),
        "step, updates at once": beside(updated_at_once),
    }


def everything(asked: Problem) -> Plan:
    """Some plan of one stage, to change."""
    return next(each for each in POLICIES["zero-offload"](asked) if each is not None).make()  # type: ignore[union-attr]


def accounts(
    cluster: ClusterSpec, costs: CostModel, batches: Sequence[int], *, step: int, execute: bool = False
) -> Table:
    table = Table(title=f"GPT of 4.2e9 parameters, sequence {SEQ_LENGTH}: predicted s per step")
    for batch in batches:
        asked = problem(cluster, costs, batch)
        plans: dict[str, tuple[Plan, str]] = {}
        for name, listing in POLICIES.items():
            found = best_plan(listing(asked), asked, Deadline(60.0, CountedWork()))
            if found is not None:
                stage = found.plan.replicas[0].stages[0]
                plans[name] = found.plan, f"{stage.micro_batch_size}, {stage.recompute_num_layers or stage.recompute}"
        for name, previews in (("best positions", True), ("best, no previews", False)):
            search = Search(asked, step=step, previews=previews)
            _, at = search.best()
            plans[name] = at.plan(search.start), at.in_words()
        base_s = None
        for name, (plan, what) in plans.items():
            row = account(plan, cluster, costs)
            if execute:
                row = {"executed": executed_s(plan, cluster, costs), **row}
            seconds = row["executed" if execute else "step"]
            base_s = base_s or seconds
            if not table.columns:
                for column in ("batch", "plan", *row, "ratio", "what"):
                    table.add_column(column)
            table.add_row(str(batch), name, *(f"{each:.3f}" for each in row.values()), f"{base_s / seconds:.2f}", what)
        table.add_section()
    return table


def ratios(cluster: ClusterSpec, costs: CostModel, batches: Sequence[int], step: int) -> Table:
    table = Table(title="times faster than ZeRO-Offload's policy, predicted")
    for column in ("batch", "parameters/s", "GB/s", "zero-offload, s", *OTHERS, "best, no previews", "best positions"):
        table.add_column(column)
    for batch, (update, link) in itertools.product(batches, RATES):
        asked = problem(with_rates(cluster, update=update, link=link), costs, batch)
        base, *others = (
            best_plan(POLICIES[name](asked), asked, Deadline(60.0, CountedWork())) for name in ("zero-offload", *OTHERS)
        )
        assert base is not None
        found = [other.step_s if other is not None else float("inf") for other in others]
        found += [Search(asked, step=step, previews=previews).best()[0] for previews in (False, True)]
        cells = (f"{base.step_s / seconds:.2f}" for seconds in found)
        table.add_row(str(batch), f"{update:g}", f"{link:g}", f"{base.step_s:.3f}", *cells)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--execute", action="store_true", help="run the plans in emulation too")
    parser.add_argument("--rates", action="store_true", help="only the ratios, by host rates")
    parser.add_argument("--step", type=int, default=4, help="layers from one number of the grid to the next")
    args = parser.parse_args(argv)
    cluster = clusters()["one"]
    costs = costs_of("one")
    made = (
        ratios(cluster, costs, args.batches, args.step)
        if args.rates
        else accounts(cluster, costs, args.batches, step=args.step, execute=args.execute)
    )
    Console(width=230).print(made)


if __name__ == "__main__":
    main()
