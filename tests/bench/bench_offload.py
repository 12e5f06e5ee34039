"""Trains beside a host's memory by several policies: predicted steps, and the same plans executed in emulation.

    python -m tests.bench.bench_offload                   predicted seconds per step, by batch
    python -m tests.bench.bench_offload --execute         the same plans executed (hetero.emulation), some minutes
    python -m tests.bench.bench_offload --setup four      four unlike cards on one host
    python -m tests.bench.bench_offload --capped          Llama-7B on two cards of 24 GiB, beside unlimited memory
    python -m tests.bench.bench_offload --rates           the ratio to ZeRO-Offload's policy beside other hosts

Everything here is a model of a machine: an A100-40 and its host as described below. Policies are plans of this runtime
that follow the rules of others (:mod:`hetero.planner.listed.offload_policies`), not the others' software.

Four unlike cards of one host are four node types of one card here, each with a quarter of that host: the cluster file
says one sort of device for a node, and updates share threads evenly anyway.

The rates of the host are assumptions, stated here because everything depends on them: AdamW updates 4e9 parameters per
second with all threads, which is what the authors of ZeRO-Offload (arXiv 2101.06840) aim at with two 24-core
processors; pinned copies take 24 GB/s in either direction.
"""

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence

warnings.filterwarnings("ignore")

from hetero.runtime import cpu_backend  # noqa: E402

cpu_backend.install()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from hetero.cost.cost_model import CostModel  # noqa: E402
from hetero.cost.simulation.simulator import simulate  # noqa: E402
from hetero.data.cost_models import model_costs  # noqa: E402
from hetero.emulation.options import EmulationOptions  # noqa: E402
from hetero.emulation.ranks.local_launch import ADAM, EmulatedLaunch, run_emulated  # noqa: E402
from hetero.errors import PlanError  # noqa: E402
from hetero.plan.ir import Plan  # noqa: E402
from hetero.plan.offload import NOTHING_ON_HOST  # noqa: E402
from hetero.planner.deadline import CountedWork, Deadline  # noqa: E402
from hetero.planner.listed.listed_plans import Listing, best_plan  # noqa: E402
from hetero.planner.listed.offload_policies import POLICIES  # noqa: E402
from hetero.planner.plan_cluster import plan_cluster  # noqa: E402
from hetero.planner.problem import Problem  # noqa: E402
from hetero.planner.scoring import ScoredPlan  # noqa: E402
from hetero.report.plan_wording import offload_of  # noqa: E402
from hetero.runtime.options import DataParallelOptions  # noqa: E402
from hetero.spec.cluster import ClusterSpec, Links, NodeType  # noqa: E402
from hetero.spec.host import HostProfile, UpdateRate  # noqa: E402
from hetero.spec.link import Link  # noqa: E402
from hetero.spec.model import ModelSpec  # noqa: E402
from hetero.spec.parameters import parameters  # noqa: E402
from tests.helpers.models import gpt2_model, llama_model  # noqa: E402

SEQ_LENGTH = 1024


def _gpt(num_layers: int) -> ModelSpec:
    return gpt2_model(
        num_layers=num_layers,
        hidden_size=2304,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=144,
        ffn_hidden_size=4 * 2304,
        vocab_size=50257,
        padded_vocab_size=50304,
        max_position_embeddings=SEQ_LENGTH,
    )


GPT_4B = _gpt(64)
"""4.2 billion parameters: 64 layers of 2304, as PatrickStar's authors train (arXiv 2108.05818)."""

GPT_5B = _gpt(80)
"""5.2 billion parameters: their weights fit a card of 16 GiB in half precision, and all of their state none of four."""

LLAMA_7B = llama_model(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    ffn_hidden_size=11008,
    vocab_size=32000,
    padded_vocab_size=32000,
    max_position_embeddings=2048,
)

UNLIMITED_GIB = 200

BATCHES = (2, 4, 8, 16, 32)

RATES = (*((update, 24.0) for update in (1e9, 2e9, 4e9, 8e9, 16e9)), (4e9, 12.0), (4e9, 48.0))
"""Parameters that a host updates in a second, and GB/s of copies: the assumed host, and others."""

BATCH_OF_RATES = 4

NEVER_CLIPPED = 1e9


def host(share: int = 1) -> HostProfile:
    """The assumed host, or one of so many equal parts of it; every card has its own link."""
    copy = Link(bandwidth_gb_per_s=24.0, latency_us=10.0)
    return HostProfile(
        source="assumed, see the head of this file",
        memory_gib=512 // share,
        updates=(
            UpdateRate(threads=1, elements_per_s=1.2e8),
            UpdateRate(threads=48 // share, elements_per_s=4e9 / share),
        ),
        memory_copy_gb_per_s=80.0 / share,
        to_host=copy,
        to_device=copy,
    )


def with_rates(cluster: ClusterSpec, *, update: float, link: float) -> ClusterSpec:
    (node_type,) = cluster.node_types
    assert node_type.host is not None
    copy = Link(bandwidth_gb_per_s=link, latency_us=10.0)
    host = dataclasses.replace(
        node_type.host,
        updates=(UpdateRate(threads=48, elements_per_s=update),),
        to_host=copy,
        to_device=copy,
    )
    return dataclasses.replace(cluster, node_types=(dataclasses.replace(node_type, host=host),))


UNLIKE = ("A100-40", "RTX-3090", "Titan-RTX", "V100-16")


def clusters() -> dict[str, ClusterSpec]:
    inside = Link(bandwidth_gb_per_s=20.0, latency_us=10.0)
    one = NodeType(name="a100", device="A100-40", gpus_per_node=1, inside_node=inside, host=host())
    four = [NodeType(name=device, device=device, gpus_per_node=1, host=host(len(UNLIKE))) for device in UNLIKE]
    return {
        "one": ClusterSpec(node_types=(one,), links=Links()),
        "four": ClusterSpec(node_types=tuple(four), links=Links(between_nodes=inside)),
    }


def costs_of(setup: str) -> CostModel:
    """By the shipped profiles, and for four cards in fp16, as not all of them multiply in bf16."""
    if setup == "one":
        return model_costs(GPT_4B, seq_length=SEQ_LENGTH, precision="bf16")
    return model_costs(GPT_5B, seq_length=SEQ_LENGTH, precision="fp16", data_sheets=True)


def problem(cluster: ClusterSpec, costs: CostModel, batch: int, time_limit_s: float = 20.0) -> Problem:
    """The question of this bench, whose optimizer's state is shared."""
    return Problem(
        cluster=cluster,
        costs=costs,
        global_batch_size=batch,
        distributed_optimizer=True,
        time_limit_s=time_limit_s,
    )


def title_of(costs: CostModel, what: str) -> str:
    """A table's head: the model, and ``what`` its numbers are."""
    billions = sum(each.numel for each in parameters(costs.model)) / 1e9
    return f"GPT of {billions:.1f}e9 parameters, sequence {SEQ_LENGTH}: {what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A plan by somebody's rules; ``None`` if none fits."""

    name: str
    found: ScoredPlan | None


def policies(problem: Problem, limit_s: float) -> Iterator[Policy]:
    """Those of others, and the planner's, without previews (as if every step were clipped) and with."""
    for name, listing in POLICIES.items():
        yield Policy(name=name, found=_listed(listing(problem), problem, limit_s))
    for name, previews in (("ours, every step clipped", False), ("ours", True)):
        yield Policy(name=name, found=_planned(dataclasses.replace(problem, previews=previews), limit_s))


def _listed(listing: Listing, problem: Problem, limit_s: float) -> ScoredPlan | None:
    return best_plan(listing, problem, Deadline(limit_s, CountedWork()))


def _planned(problem: Problem, limit_s: float) -> ScoredPlan | None:
    try:
        return plan_cluster(problem, deadline=Deadline(limit_s, CountedWork())).scored
    except PlanError as error:
        print(error, file=sys.stderr)
        return None


def executed_s(plan: Plan, cluster: ClusterSpec, costs: CostModel, *, time_scale: float | None = None) -> float:
    """Seconds of the last of three emulated steps that are never clipped."""
    ran = run_emulated(
        EmulatedLaunch(
            plan=plan,
            cluster=cluster,
            costs=costs,
            options=EmulationOptions(time_scale=time_scale, seq_length=16),
            data_parallel=DataParallelOptions(bucket_numel=costs.runtime.bucket_numel),
            adam=dataclasses.replace(ADAM, clip_grad=NEVER_CLIPPED),
            num_steps=3,
        ),
        timeout_s=1200,
    )
    last = ran.ranks[0][-1]
    return last.end_s - last.start_s


def capped(batches: Sequence[int], time_limit_s: float) -> Table:
    """Llama-7B on two described RTX 3090 of 24 GiB: the plan, the same plan with memory for everything (its stages and
    what it computes again as they are, all optimizer state on the devices), and the best plan with such memory."""
    costs = model_costs(LLAMA_7B, seq_length=2048, precision="bf16", data_sheets=True)
    inside = Link(bandwidth_gb_per_s=12.0, latency_us=20.0)
    card = NodeType(name="desktop", device="RTX-3090", gpus_per_node=2, inside_node=inside, host=host())
    table = Table(title="Llama-7B, sequence 2048, two RTX 3090 of 24 GiB: s per step")
    for column in ("batch", "24 GiB", "the same plan, unlimited", "ratio", "best plan, unlimited", "ratio"):
        table.add_column(column)
    for batch in batches:
        found = []
        for memory_gib in (24, UNLIMITED_GIB):
            cluster = ClusterSpec(node_types=(dataclasses.replace(card, memory_gib=memory_gib),), links=Links())
            deadline = Deadline(time_limit_s, CountedWork())
            found.append(plan_cluster(problem(cluster, costs, batch), deadline=deadline).scored)
        ours, best = found
        kept = {
            r: replica.with_each_stage(offload=[NOTHING_ON_HOST] * len(replica.stages))
            for r, replica in enumerate(ours.plan.replicas)
        }
        same_s = simulate(ours.plan.with_replicas(kept), cluster, costs).step_s
        ratios = (f"{ours.step_s / seconds:.3f}" for seconds in (same_s, best.step_s))
        table.add_row(
            str(batch), f"{ours.step_s:.4g}", f"{same_s:.4g}", next(ratios), f"{best.step_s:.4g}", next(ratios)
        )
    return table


def beside_other_hosts(time_limit_s: float) -> Table:
    """How many times faster than the best plan by ZeRO-Offload's rules the planner's are beside hosts of other rates:
    its plan for the assumed host as it is, and one for each host."""
    cluster, costs = clusters()["one"], costs_of("one")
    asked = problem(cluster, costs, BATCH_OF_RATES, time_limit_s)
    as_it_is = _planned(asked, time_limit_s)
    assert as_it_is is not None
    table = Table(title=title_of(costs, f"times faster than ZeRO-Offload's policy at a batch of {BATCH_OF_RATES}"))
    for column in ("parameters/s", "GB/s", "zero-offload, s", "the plan for 4e9 and 24 as it is", "planned for it", ""):
        table.add_column(column)
    for update, link in RATES:
        there = dataclasses.replace(asked, cluster=with_rates(cluster, update=update, link=link))
        base = _listed(POLICIES["zero-offload"](there), there, time_limit_s)
        ours = _planned(there, time_limit_s)
        assert base is not None
        assert ours is not None
        same_s = simulate(as_it_is.plan, there.topology, costs).step_s
        ratios = (f"{base.step_s / seconds:.2f}" for seconds in (same_s, ours.step_s))
        table.add_row(f"{update:g}", f"{link:g}", f"{base.step_s:.3f}", *ratios, offload_of(ours.plan))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=list(clusters()), default="one")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--capped", action="store_true", help="only Llama-7B on two small cards")
    parser.add_argument("--rates", action="store_true", help="only the ratios beside hosts of other rates")
    parser.add_argument("--execute", action="store_true", help="run the plans in emulation too")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of counted work for each plan")
    parser.add_argument("--time-scale", type=float, help="wall seconds per emulated second")
    args = parser.parse_args(argv)
    if args.capped:
        Console(width=160).print(capped((8, 16, 32, 64), args.time_limit))
        return
    if args.rates:
        Console(width=160).print(beside_other_hosts(args.time_limit))
        return
    cluster = clusters()[args.setup]
    costs = costs_of(args.setup)
    table = Table(title=title_of(costs, "s per step"))
    for column in ("batch", "policy", "predicted", "executed", "times faster than zero-offload", "what"):
        table.add_column(column)
    for batch in args.batches:
        asked = problem(cluster, costs, batch, args.time_limit)
        base_s = None
        for policy in policies(asked, args.time_limit):
            if policy.found is None:
                table.add_row(str(batch), policy.name, "does not fit")
                continue
            predicted_s = simulate(policy.found.plan, asked.topology, costs).step_s
            ran_s = executed_s(policy.found.plan, cluster, costs, time_scale=args.time_scale) if args.execute else None
            seconds = predicted_s if ran_s is None else ran_s
            base_s = seconds if policy.name == "zero-offload" else base_s
            stage = policy.found.plan.replicas[0].stages[0]
            table.add_row(
                str(batch),
                policy.name,
                f"{predicted_s:.4g}",
                "" if ran_s is None else f"{ran_s:.4g}",
                f"{base_s / seconds:.2f}" if base_s else "",
                f"microbatches of {stage.micro_batch_size}, {stage.recompute} {stage.recompute_num_layers or ''}; "
                f"{offload_of(policy.found.plan)}",
            )
        table.add_section()
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
