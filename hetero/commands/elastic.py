"""``hetero elastic``: training that goes on while nodes come and go. One agent per node; they meet in etcd."""

import argparse
import dataclasses
import platform
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hetero.command_line import COUNT
from hetero.commands.elastic_report import add_report
from hetero.commands.elastic_store import DEFAULT_PORT, add_store
from hetero.commands.elastic_tls import copies_warning, copy_tls, etcd_address, etcd_warning, transport_of
from hetero.console import console
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.installed_versions import versions_of
from hetero.report.tables.fitting_table import FittingTable
from hetero.standard_output import answer
from hetero.version import VERSION

if TYPE_CHECKING:
    from hetero.elastic.agent_options import AgentOptions
    from hetero.elastic.job_store import JobState, JobStore
    from hetero.elastic.records import CopyTransport, JobSettings, Outcome
    from hetero.elastic.stragglers import StragglerSettings

DEFAULT_UPLOAD_EVERY = "10m"
"""A choice: what is lost at most if all nodes are lost at once, where an upload takes no longer than that."""

_PACKAGES = ("torch", "megatron-core")
"""Packages that have to be the same on all nodes, as this project has to be."""


def add_elastic(commands: Any) -> None:
    """Add the parsers of ``hetero elastic`` and its commands."""
    parser = commands.add_parser(
        "elastic",
        help="train on while nodes come and go",
        description="Training that goes on while nodes come and go, each with an agent; docs/elastic.md tells how.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_agent(actions)
    add_store(actions)
    _add_status(actions)
    _add_leave(actions)
    _add_forget(actions)
    _add_run(actions)
    add_report(actions)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Which job is meant, and where its etcd is."""
    group = parser.add_argument_group("job")
    group.add_argument("--job", default="hetero", metavar="NAME", help="name of the job (default: %(default)s)")
    group.add_argument(
        "--etcd",
        metavar="URL[,URL...]",
        help=f"where etcd listens, each member of it (default: port {DEFAULT_PORT} of this machine)",
    )
    group.add_argument(
        "--certificates",
        type=Path,
        metavar="FOLDER",
        help="made by hetero elastic store: stands for --etcd-ca, --etcd-cert and --etcd-key",
    )
    group.add_argument("--etcd-ca", metavar="PEM", help="authority that has signed etcd's certificate")
    group.add_argument("--etcd-cert", metavar="PEM", help="certificate that this client shows etcd")
    group.add_argument("--etcd-key", metavar="PEM", help="its key")


def add_leader_options(parser: argparse.ArgumentParser) -> None:
    """How patient a job is; the leader's count."""
    group = parser.add_argument_group("patience")
    group.add_argument("--lease", type=COUNT, default=10, metavar="S", help="seconds after which a silent node is lost")
    group.add_argument("--min-nodes", type=COUNT, default=1, metavar="N", help="that have to be there before it begins")
    group.add_argument(
        "--wait-for-nodes", type=float, default=600.0, metavar="S", help="seconds to wait for nodes enough, then leave"
    )
    group.add_argument(
        "--wait-for-etcd",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that an agent waits for etcd when it needs it (default: %(default)g)",
    )
    group.add_argument(
        "--dwell", type=float, default=60.0, metavar="S", help="seconds that an epoch lasts before a node may join"
    )
    group.add_argument(
        "--min-gain", type=float, default=0.05, metavar="SHARE", help="by which a join has to shorten the step"
    )
    group.add_argument(
        "--straggler-threshold",
        type=float,
        default=1.3,
        metavar="TIMES",
        help="a node that computes so many times as slowly as it should, beside the others, is planned for as a slower "
        "one; inf for none (default: %(default)s)",
    )
    group.add_argument(
        "--straggler-after",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for which it has to, and to be as fast as its type again (default: %(default)s)",
    )
    group.add_argument(
        "--leave-within", type=float, default=30.0, metavar="S", help="seconds that a node is there after SIGTERM"
    )


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """What goes to an object store."""
    group = parser.add_argument_group("object store")
    group.add_argument("--object-store", metavar="URL", help="where steps go: s3://..., gs://..., az://..., file://...")
    group.add_argument(
        "--upload-every",
        default=DEFAULT_UPLOAD_EVERY,
        metavar="STEPS|TIME",
        help="a committed step goes there, e.g. after 500 steps, 90s, 10m or 2h (default: %(default)s)",
    )
    group.add_argument(
        "--keep-uploads", type=COUNT, default=2, metavar="N", help="steps that stay (default: %(default)s)"
    )


def add_program(parser: argparse.ArgumentParser) -> None:
    """What ranks run."""
    parser.add_argument("program", nargs="+", metavar="-- PROGRAM FLAGS", help="e.g. -- pretrain_gpt.py --lr 1e-3 ...")


def open_job(args: argparse.Namespace) -> "JobStore":
    """Open the keys of the job that the flags name, with a warning if others on the network could do so as well.

    Raises:
        ConfigError: as :func:`etcd_address`, or a file of TLS is wrong.
    """
    from hetero.elastic.job_store import JobStore

    address = etcd_address(args)
    if (warning := etcd_warning(address)) is not None:
        print(f"hetero: warning: {warning}", file=sys.stderr)
    return JobStore(address, args.job)


def _add_agent(actions: Any) -> None:
    parser = actions.add_parser(
        "agent",
        help="stand for this node: start, watch and replace its ranks",
        epilog="Exit codes: 0 if all is saved or the job goes on without this node; 75 if this node was asked to leave "
        "and the training has committed no step since this agent started; docs/elastic.md lists all.",
    )
    add_job_options(parser)
    node = parser.add_argument_group("node")
    node.add_argument("--node-type", required=True, metavar="TYPE", help="of the cluster file")
    node.add_argument("--node-name", default=socket.gethostname(), metavar="NAME", help="(default: the host's)")
    node.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="by which others reach this node (default: %(default)s)"
    )
    node.add_argument("--port", type=int, default=0, help="to serve copies on (default: a free one)")
    node.add_argument("--failure-domain", metavar="NAME", help="nodes of one are lost together (default: the node's)")
    node.add_argument(
        "--copies",
        type=Path,
        metavar="FOLDER",
        help="default: /dev/shm/hetero-JOB-NODE, with a random ending if another user has taken that name",
    )
    node.add_argument("--logs", type=Path, metavar="FOLDER", help="default: elastic-logs/JOB")
    node.add_argument(
        "--tls-cert",
        type=Path,
        metavar="PEM",
        help="serve copies with this certificate, the same on all nodes (default: the one that etcd is shown)",
    )
    node.add_argument("--tls-key", type=Path, metavar="PEM", help="its key")
    node.add_argument("--metadata", metavar="CLOUD", help="ask its metadata server for notices: aws, gcp or azure")
    node.add_argument("--metadata-url", metavar="URL", help="where that server is, if not at its own address")
    add_leader_options(parser)
    add_store_options(parser)
    add_program(parser)
    parser.set_defaults(run=_run_agent)


def _run_agent(args: argparse.Namespace) -> int:
    require("elastic", asked_by="hetero elastic")
    from hetero.elastic.agent_process import run_agent

    options = agent_options(args)
    for warning in (etcd_warning(options.etcd), copies_warning(options.host, options.tls)):
        if warning is not None:
            print(f"hetero: warning: {warning}", flush=True)
    return run_agent(options)


def agent_options(args: argparse.Namespace) -> "AgentOptions":
    """What the flags say.

    Raises:
        ConfigError: a flag is wrong, or the program is not there.
    """
    from hetero.elastic.agent_options import AgentOptions
    from hetero.elastic.folder_claim import choose_folder
    from hetero.elastic.leadership import LeaderSettings
    from hetero.elastic.notices import metadata_source
    from hetero.elastic.uploads import upload_schedule

    if args.metadata_url is not None and args.metadata is None:
        raise ConfigError("--metadata-url: name the cloud whose answers are expected there, with --metadata")
    name = args.node_name
    if not all(each.isalnum() or each in "-_." for each in name):
        raise ConfigError(f"--node-name {name!r}: takes letters, digits, '-', '_' and '.' only")
    etcd = etcd_address(args)
    tls = copy_tls(args, etcd)
    return AgentOptions(
        job=args.job,
        etcd=etcd,
        lease_s=args.lease,
        wait_for_etcd_s=args.wait_for_etcd,
        name=name,
        node_type=args.node_type,
        host=args.host,
        port=args.port,
        failure_domain=args.failure_domain or name,
        folder=args.copies or choose_folder(args.job, name, say=partial(print, flush=True)),
        logs=args.logs or Path("elastic-logs") / args.job,
        settings=job_settings(args, copy_transport=transport_of(tls)),
        leave_within_s=args.leave_within,
        leader=LeaderSettings(
            min_nodes=args.min_nodes,
            missing_s=args.wait_for_nodes,
            dwell_s=args.dwell,
            min_gain=args.min_gain,
        ),
        stragglers=straggler_settings(args),
        metadata=None if args.metadata is None else metadata_source(args.metadata, url=args.metadata_url),
        object_store=args.object_store,
        uploads=upload_schedule(args.upload_every),
        keep_uploads=args.keep_uploads,
        tls=tls,
    )


def straggler_settings(args: argparse.Namespace) -> "StragglerSettings":
    """When the flags say that a node is a straggler.

    Raises:
        ConfigError: a threshold below which a node has recovered already, or a negative time.
    """
    from hetero.elastic.stragglers import StragglerSettings

    recovered = StragglerSettings().recovered
    if not args.straggler_threshold > recovered or not args.straggler_after >= 0:
        raise ConfigError(
            f"--straggler-threshold {args.straggler_threshold:g}, --straggler-after {args.straggler_after:g}: take "
            f"more than {recovered:g} times, below which a node counts as fast again, and no negative seconds"
        )
    return StragglerSettings(threshold=args.straggler_threshold, for_s=args.straggler_after)


def job_settings(args: argparse.Namespace, *, copy_transport: "CopyTransport") -> "JobSettings":
    """The settings of a job as the flags say.

    Args:
        copy_transport: how copies travel.

    Raises:
        ConfigError: the program is not there, or the URL of the object store names none or holds credentials.
    """
    from hetero.elastic.records import JobSettings
    from hetero.elastic.store_connection import kind_of_store

    if args.object_store is not None:
        kind_of_store(args.object_store)
    program, *flags = args.program
    if not Path(program).is_file():
        raise ConfigError(f"{program}: no such program; after -- comes a Python file and its flags")
    return JobSettings(
        program=program,
        flags=tuple(flags),
        versions={"python": platform.python_version(), "megatron-hetero": VERSION, **versions_of(_PACKAGES)},
        object_store=args.object_store,
        upload_every=args.upload_every if args.object_store is not None else "",
        copy_transport=copy_transport,
    )


def _add_status(actions: Any) -> None:
    parser = actions.add_parser("status", help="show who is in a job, and what they do")
    add_job_options(parser)
    parser.set_defaults(run=_run_status)


def _run_status(args: argparse.Namespace) -> int:
    require("elastic", asked_by="hetero elastic")
    from hetero.elastic.job_settings import COPIES_TRAVEL, shown_settings

    state = open_job(args).read()
    if state.token is None:
        raise _no_such_job(args)
    console().print(_status_table(args.job, state))
    if state.settings is not None:
        print(f"copies travel {COPIES_TRAVEL[state.settings.copy_transport]}")
    for problem in state.unreadable.values():
        print(problem)
    if state.outcome is not None:
        print(_way_on(args, state.outcome))
    settings = None if state.settings is None else shown_settings(state.settings)
    # The token opens the copies of all nodes.
    answer(args, lambda: {"job": args.job, "state": dataclasses.replace(state, token=None, settings=settings)})
    return 0


def _no_such_job(args: argparse.Namespace) -> ConfigError:
    return ConfigError(
        f"etcd at {', '.join(etcd_address(args).urls)} knows no job {args.job}; give the --job that its agents were "
        "given"
    )


def _way_on(args: argparse.Namespace, outcome: "Outcome") -> str:
    """What to do after a job has ended."""
    from hetero.elastic.ends import forget_command

    forget = forget_command(etcd_address(args), args.job)
    if outcome.exit_code == 0 and not outcome.resumes:
        return f"to use its name again: {forget}"
    flags = " with the same flags" if outcome.resumes else ""
    return f"it goes on when its agents are started again under --job {args.job}{flags}; to give it up: {forget}"


def _status_table(job: str, state: "JobState") -> Table:
    """One row per node; what all share above it."""
    from hetero.elastic.stragglers import slower_type

    title = f"job {job}: "
    if state.outcome is not None:
        title += f"over with exit code {state.outcome.exit_code}: {state.outcome.reason}"
    elif state.epoch is None:
        title += "waiting for nodes"
    else:
        title += f"epoch {state.epoch.number} from step {state.epoch.start.step}: {state.epoch.reason}"
        if over := state.broken or state.stop:
            title += f"; ends: {over}"
    table = FittingTable(title=title)
    for name in (
        "node",
        "type",
        "address",
        "domain",
        "ranks",
        "phase",
        "step",
        "committed",
        "step time",
        "computing",
        "notice",
    ):
        table.add_column(name)
    members = {} if state.epoch is None else {each.node.name: each.ranks for each in state.epoch.nodes}
    slower = {} if state.epoch is None else state.epoch.slower
    for name, node in state.nodes.items():
        report = state.reports.get(name)
        ranks = () if report is None else report.ranks
        table.add_row(
            f"{name} (leads)" if node.incarnation == state.leader else name,
            slower_type(node.node_type, slower.get(name, 1.0)),
            f"{node.host}:{node.port}",
            node.failure_domain,
            " ".join(map(str, members.get(name, ()))) or "-",
            ", ".join(sorted({rank.phase for rank in ranks})) or "-",
            str(max((rank.step for rank in ranks), default=0)),
            str(max((rank.committed for rank in ranks), default=0)),
            _milliseconds(max((rank.step_s for rank in ranks), default=0.0)),
            _milliseconds(max((rank.compute_s for rank in ranks), default=0.0)),
            notice.reason if (notice := state.notices.get(name)) is not None else "",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds else "-"


def _add_leave(actions: Any) -> None:
    parser = actions.add_parser("leave", help="have a node leave its job once the step in hand is committed")
    add_job_options(parser)
    parser.add_argument("node", metavar="NODE")
    parser.set_defaults(run=_run_leave)


def _run_leave(args: argparse.Namespace) -> int:
    require("elastic", asked_by="hetero elastic")
    from hetero.elastic.records import Notice

    store = open_job(args)
    nodes = store.read().nodes
    if args.node not in nodes:
        raise ConfigError(f"job {args.job} has no node {args.node!r}; it has {', '.join(nodes) or 'none'}")
    store.put_notice(Notice(node=args.node, reason="hetero elastic leave"))
    print(f"node {args.node} leaves once the step in hand is committed")
    answer(args, lambda: {"job": args.job, "node": args.node, "leaves": True})
    return 0


def _add_forget(actions: Any) -> None:
    parser = actions.add_parser(
        "forget", help="delete what etcd has of a job that no node is in, to use its name again"
    )
    add_job_options(parser)
    parser.set_defaults(run=_run_forget)


def _run_forget(args: argparse.Namespace) -> int:
    require("elastic", asked_by="hetero elastic")
    store = open_job(args)
    state = store.read()
    if state.token is None:
        raise _no_such_job(args)
    if not store.forget():
        state = store.read()
        unreadable = [problem for key, problem in state.unreadable.items() if key.startswith("nodes/")]
        if not state.nodes and unreadable:
            raise ConfigError(f"{'; '.join(unreadable)}; end the agent that wrote it, or delete that key if none did")
        raise ConfigError(
            f"job {args.job} has the nodes {', '.join(state.nodes)}; end their agents first (hetero elastic leave "
            "NODE), or wait until the leases of lost ones are over"
        )
    print(
        f"etcd knows job {args.job} no more: agents under this name begin another run, and each deletes what copies of "
        "the old one its node has"
    )
    answer(args, lambda: {"job": args.job, "forgotten": True})
    return 0


def _add_run(actions: Any) -> None:
    parser = actions.add_parser("run", help="a whole job on this machine: etcd and some agents, to try things out")
    parser.add_argument("--job", default="hetero", metavar="NAME", help="name of the job (default: %(default)s)")
    parser.add_argument("--nodes", type=COUNT, required=True, metavar="N", help="the first N of the cluster file")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: elastic-logs/JOB")
    add_leader_options(parser)
    add_store_options(parser)
    add_program(parser)
    parser.set_defaults(run=_run_all)


def _run_all(args: argparse.Namespace) -> int:
    require("elastic", asked_by="hetero elastic")
    from hetero.commands.elastic_run import run_on_this_machine

    return run_on_this_machine(args)
