"""``hetero show`` prints a plan, ``hetero validate`` checks one; neither needs a GPU or torch."""

import argparse
from pathlib import Path
from typing import Any

from hetero.console import console
from hetero.cost.capacity import capacity_bytes, check_memory
from hetero.cost.runtime_model import HETERO
from hetero.errors import HeteroError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.communicators import PlanCommunicators
from hetero.plan.gradient_groups import Bucket, by_number, gradient_buckets
from hetero.plan.ir import Plan, Replica
from hetero.plan.lowering import lower, step_rows
from hetero.plan.validate import validate
from hetero.report.plan_wording import communicators_in_words, provenance_lines, ranks_in_words
from hetero.report.tables.plan import plan_picture, plan_table
from hetero.schedule.actions import COMPUTE, format_schedule
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import answer


def add_show(commands: Any) -> None:
    """Add the parser of ``hetero show``."""
    parser = commands.add_parser("show", help="print a plan as a table and a picture")
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--schedule", action="store_true", help="print the order of forwards and backwards on the ranks of every stage"
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="print all that the ranks of every stage do in a step, with what each action waits for",
    )
    parser.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    plan = legal_plan(args.plan)
    out = console()
    out.print(plan_table(plan))
    print(f"\n{plan_picture(plan, room=out.width)}\n\ncommunicators: {communicators_in_words(plan)}")
    for line in provenance_lines(plan):
        print(line)
    if args.schedule:
        for r, replica in enumerate(plan.replicas):
            print(f"\nreplica {r}\n{_schedule_text(replica)}")
    if args.program:
        print(f"\n{_program_text(plan)}")
    answer(args, lambda: _document(plan, args))
    return 0


def _document(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """The plan, and what is shown beside it; a schedule or a program is text as it is shown, a line each."""
    communicators = PlanCommunicators(plan).counts()
    found = {"plan": plan, "communicators": {str(rank): communicators[rank] for rank in sorted(plan.ranks())}}
    if args.schedule:
        found["schedules"] = [_schedule_text(replica).splitlines() for replica in plan.replicas]
    if args.program:
        found["program"] = _program_text(plan).splitlines()
    return found


def add_validate(commands: Any) -> None:
    """Add the parser of ``hetero validate``."""
    parser = commands.add_parser("validate", help="say whether a plan is legal, and whether it fits a cluster")
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument("--cluster", type=Path, metavar="CLUSTER.yaml", help="check devices, nodes and memory as well")
    parser.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> int:
    plan = legal_plan(args.plan)
    fits, unknown = "", None
    if args.cluster is not None:
        cluster = load(ClusterSpec, args.cluster)
        check_plan_on_cluster(plan, cluster)
        check_memory(plan, cluster)
        unknown = _unknown_memory(plan, cluster)
        said = f" (memory of {', '.join(unknown)} unknown)" if unknown else ""
        fits = f", fits {args.cluster}{said}"
    num_stages = sum(len(replica.stages) for replica in plan.replicas)
    print(
        f"{args.plan}: ok{fits} (replicas: {len(plan.replicas)}, stages: {num_stages}, ranks: {plan.world_size}, "
        f"idle: {len(plan.idle_ranks)})"
    )
    answer(
        args,
        lambda: {
            "plan": args.plan,
            "cluster": args.cluster,
            "replicas": len(plan.replicas),
            "stages": num_stages,
            "ranks": plan.world_size,
            "idle_ranks": plan.idle_ranks,
            "devices_of_unknown_memory": unknown,
        },
    )
    return 0


def _unknown_memory(plan: Plan, cluster: ClusterSpec) -> list[str]:
    """The devices of the plan whose memory nobody knows."""
    return list(dict.fromkeys(stage.device for *_, stage in plan.stages() if capacity_bytes(stage, cluster) is None))


def legal_plan(path: Path) -> Plan:
    """The plan in ``path``, checked.

    Raises:
        ConfigError: the file is missing or malformed.
        PlanError: the plan is not legal.
    """
    plan = load(Plan, path)
    try:
        validate(plan)
    except HeteroError as error:
        raise type(error)(f"{path}: {error}") from None
    return plan


def _schedule_text(replica: Replica) -> str:
    rows = step_rows(replica)
    return format_schedule([[action for action in row if action.kind in COMPUTE] for row in rows])


def _program_text(plan: Plan) -> str:
    """The programs of all device groups, below the buckets that these sum."""
    buckets = by_number(gradient_buckets(plan, bucket_numel=_bucket_numel(plan)))
    in_programs = [(n, bucket) for n, bucket in enumerate(buckets) if len(bucket.ranks) > 1 or bucket.on_host]
    heads = "\n".join(
        f"# bucket {n}: {ranks_in_words(bucket.ranks)}, {bucket.numel:,} gradients from position {bucket.position:g} on"
        f"{_on_host_in_words(bucket)}"
        for n, bucket in in_programs
    )
    return "\n\n".join([*([heads] if heads else []), *map(str, lower(plan, buckets))])


def _on_host_in_words(bucket: Bucket) -> str:
    if not bucket.on_host:
        return ""
    added = bucket.gradients_on_host
    there = f", where those of {ranks_in_words(tuple(sorted(added)))} add up" if added else ""
    kept = bucket.weights_on_host
    there += f" and the weights of {ranks_in_words(tuple(sorted(kept)))} live" if kept else ""
    return f", updated on the host by {ranks_in_words(tuple(sorted(bucket.on_host)))}{there}"


def _bucket_numel(plan: Plan) -> int:
    """The plan's value, or that of a launch without flags."""
    return plan.gradient_sync.bucket_numel or HETERO.bucket_numel
