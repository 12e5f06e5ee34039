"""``hetero launch`` takes a plan to its hosts: prints each host's line, runs all of them, or writes a Slurm script."""

import argparse
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hetero.checkpoint.folder import latest_step
from hetero.command_line import PORT
from hetero.commands.show import legal_plan
from hetero.console import console
from hetero.cost.capacity import check_memory
from hetero.distributed.rendezvous_names import RENDEZVOUS
from hetero.doctor.installed_files import install_this
from hetero.errors import ConfigError
from hetero.launch.cluster_of_plan import changes_since, cluster_of_launch
from hetero.launch.hostfile import hosts_of_file
from hetero.launch.hosts import NodeHost, assigned_hosts, check_others_reach, invented_hosts
from hetero.launch.machine_names import check_addresses_differ
from hetero.launch.planned_flags import check_nothing_is_missing, launch_flags, missing_flags, planned_flags
from hetero.launch.probing import check_hosts
from hetero.launch.run import HostCommand, run_on_hosts
from hetero.launch.slurm_batch_script import batch_script, goes_on
from hetero.launch.slurm_components import site_at_hand
from hetero.launch.slurm_nodes import place_nodes
from hetero.launch.slurm_run import run_step
from hetero.launch.slurm_step import step_words
from hetero.launch.ssh import DEFAULT_SSH, command_on, variables_line, watched
from hetero.launch.torchrun import LOOPBACK, TorchrunOptions, drawn_port, shell_text
from hetero.output_files import make_folder
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.printable import printable
from hetero.report.tables.launch import launch_table
from hetero.serialization import load
from hetero.slurm.controller import allocated_nodes
from hetero.slurm.job import SlurmJob, hostnames, job_of
from hetero.slurm.step_environment import environment_for_srun
from hetero.spec.cluster import ClusterSpec
from hetero.standard_output import STDOUT, answer, check_output, output_file, write_output

PROGRAM = "pretrain_gpt.py"

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def add_launch(commands: Any) -> None:
    """Add the parser of ``hetero launch``."""
    parser = commands.add_parser(
        "launch",
        help="print, run or submit the lines that start a plan on its hosts",
        usage="hetero launch PLAN.json [--cluster C.yaml] [--hosts H ...] [--print | --run | --sbatch [FILE]] -- FLAGS",
        description="Start a plan on its hosts. FLAGS are those of the program that the plan does not imply; "
        "docs/launch.md tells more.",
    )
    # Says that words behind -- are FLAGS, see hetero.cli.
    parser.set_defaults(run=_launch, flags=[])
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.yaml", help="default: the cluster that the plan was made for"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        nargs="+",
        metavar="[TYPE=]HOST,...",
        help="of each node type, or in the order of the cluster file (default: what Slurm has allocated, else "
        "localhost if one is enough, else made-up names); nodes of Slurm's allocation are started by srun",
    )
    hosts.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="hosts in a file, one per line, as DeepSpeed and MPI have it (HOST slots=N)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--print", action="store_true", help="print who runs where, and each host's line; the default")
    how.add_argument("--run", action="store_true", dest="start", help="run all: over ssh, or in Slurm's allocation")
    how.add_argument(
        "--sbatch", nargs="?", type=output_file, const=STDOUT, metavar="FILE", help="write a batch script, or print it"
    )
    _add_line_options(parser)
    _add_slurm_and_ssh_options(parser)


def _add_line_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lines")
    group.add_argument("--program", default=PROGRAM, metavar="FILE", help="what ranks run (default: %(default)s)")
    group.add_argument(
        "--torchrun", metavar="PATH", help="default: the one beside this Python, else 'torchrun' as the shell finds it"
    )
    group.add_argument("--master-addr", default="", metavar="ADDRESS", help="of node 0 (default: its host's name)")
    group.add_argument("--master-port", type=PORT, metavar="N", help="default: drawn at random, at every start")
    group.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable of the ranks; without a value, that of this environment, which no line and no script shows; "
        "may be repeated",
    )
    group.add_argument(
        "--numa-binding",
        choices=["node", "socket", "exclusive", "core-complex"],
        help="torchrun's: keeps a rank on the processors near its GPU (needs numactl)",
    )


def _add_slurm_and_ssh_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ssh and Slurm")
    group.add_argument(
        "--ssh", type=shlex.split, metavar="COMMAND", help=f"for --run (default: {shlex.join(DEFAULT_SSH)})"
    )
    group.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="a file for each host (default: launch-logs/TIME); under Slurm, "
        "a folder for each job and rank (default: launch-logs)",
    )
    group.add_argument(
        "--components",
        type=lambda text: text.split(","),
        default=[],
        metavar="TYPE,...",
        help="in Slurm's allocation: the node type of each component of the job, in its order (default: by the GPUs "
        "and the names of its nodes)",
    )
    group.add_argument(
        "--sbatch-option",
        action="append",
        default=[],
        metavar="[TYPE:]OPTION=VALUE",
        help="for --sbatch: such as fast:partition=a100, of one node type or of all; may be repeated",
    )


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not _VARIABLE_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"is {name!r}, must be NAME or NAME=VALUE")
    return name, value if equals else None


def _launch(args: argparse.Namespace) -> int:
    plan, cluster = _plan_and_cluster(args)
    flags = launch_flags(planned_flags(plan, args.plan), args.flags)
    if (args.start or args.sbatch is not None) and Path(args.program).name == PROGRAM:
        check_nothing_is_missing(args.flags)
    job = _job(args)
    under_slurm = args.sbatch is not None or job is not None
    _check_options_have_an_effect(args, over_ssh=args.start and not under_slurm, under_slurm=under_slurm)
    if args.start or args.sbatch is not None:
        _check_rendezvous_is_registered(args)
    if args.sbatch is not None:
        return _write_batch_script(args, cluster, flags)
    if job is not None:
        return _in_allocation(args, plan, cluster, flags, job)
    hosts = _hosts(args, cluster)
    if args.start:
        return _run(args, cluster, flags, hosts)
    _print_lines(args, plan, flags, hosts)
    return 0


def _job(args: argparse.Namespace) -> SlurmJob | None:
    """The job of Slurm that starts the plan: that of this process, unless hosts outside of it are named."""
    job = job_of(os.environ)
    if job is None or args.sbatch is not None or args.hostfile is not None or args.ssh is not None:
        return None
    nodes = {node for component in job.components for node in hostnames(component.node_list)}
    named = {host for word in args.hosts or () for host in word.rpartition("=")[2].split(",")}
    return job if named <= nodes else None


def _hosts_given_by(args: argparse.Namespace) -> str:
    """Return the flag that names hosts, as messages write it; empty if there is none."""
    if args.hostfile is not None:
        return f"--hostfile {args.hostfile}"
    return "" if args.hosts is None else "--hosts"


def _hosts(args: argparse.Namespace, cluster: ClusterSpec) -> tuple[NodeHost, ...]:
    given_by = _hosts_given_by(args)
    if not given_by:
        return invented_hosts(cluster)
    hosts = assigned_hosts(cluster, args.hosts) if args.hostfile is None else hosts_of_file(cluster, args.hostfile)
    check_addresses_differ([host.address for host in hosts], given_by=given_by)
    return hosts


def _check_options_have_an_effect(args: argparse.Namespace, *, over_ssh: bool, under_slurm: bool) -> None:
    if args.sbatch_option and args.sbatch is None:
        raise ConfigError(f"--sbatch-option {args.sbatch_option[0]} has no effect without --sbatch: add that")
    if args.components and not (under_slurm and args.sbatch is None):
        raise ConfigError("--components has no effect but in an allocation of Slurm: leave it out")
    if args.ssh is not None and not over_ssh:
        raise ConfigError("--ssh has no effect but with --run outside of Slurm: leave it out")
    if args.logs is not None and not (over_ssh or under_slurm):
        raise ConfigError("--logs has no effect but with --run or under Slurm: leave it out")
    if (given_by := _hosts_given_by(args)) and args.sbatch is not None:
        raise ConfigError(f"{given_by} beside --sbatch: Slurm chooses the hosts; leave it out, or use --sbatch-option")


def _plan_and_cluster(args: argparse.Namespace) -> tuple[Plan, ClusterSpec]:
    """The plan and the cluster of the launch, which fit one another."""
    plan = legal_plan(args.plan)
    given = None if args.cluster is None else load(ClusterSpec, args.cluster)
    cluster = cluster_of_launch(plan, given, plan_file=args.plan, file=args.cluster)
    check_plan_on_cluster(plan, cluster)
    check_memory(plan, cluster)
    if changed := changes_since(plan, cluster):
        sys.stderr.write(f"hetero: note: {changed}\n")
    return plan, cluster


def _options_of_hosts(args: argparse.Namespace, flags: Sequence[str], hosts: Sequence[NodeHost]) -> TorchrunOptions:
    """The options for named hosts; the ranks of a single one meet on loopback."""
    is_alone = len(hosts) == 1
    address, port = (LOOPBACK, 0) if is_alone else (hosts[0].address, drawn_port())
    options = _options(args, flags, address=address, port=port)
    check_others_reach(options.address, hosts)
    return options


def _own_torchrun() -> Path | None:
    """Return the torchrun of this Python, ``None`` if it has none."""
    beside = Path(sys.executable).with_name("torchrun")
    return beside if beside.exists() else None


def _check_rendezvous_is_registered(args: argparse.Namespace) -> None:
    """Check that this Python's torchrun, if it is the one of the launch, will find the rendezvous of its lines.

    Raises:
        ConfigError: it will not.
    """
    # All distributions: what an older installation has left in this folder hides the new one.
    handlers = (each.name for one in distributions() for each in one.entry_points.select(group="torchrun.handlers"))
    if args.torchrun or _own_torchrun() is None or RENDEZVOUS in handlers:
        return
    raise ConfigError(
        f"{_own_torchrun()} does not know the rendezvous {RENDEZVOUS!r}: this megatron-hetero was installed before it "
        f"had one, or is not installed; run: {install_this()}"
    )


def _options(args: argparse.Namespace, flags: Sequence[str], *, address: str, port: int) -> TorchrunOptions:
    return TorchrunOptions(
        torchrun=args.torchrun or str(_own_torchrun() or "torchrun"),
        program=args.program,
        flags=tuple(flags),
        address=args.master_addr or address,
        port=args.master_port or port,
        environment=dict(args.env),
        numa_binding=args.numa_binding,
    )


def _slurm_options(args: argparse.Namespace, flags: Sequence[str]) -> TorchrunOptions:
    """The options of a step, whose address and port follow from the job."""
    options = _options(args, flags, address="", port=0)
    return options if args.logs is None else dataclasses.replace(options, logs=str(args.logs))


def _values(environment: Mapping[str, str | None]) -> dict[str, str]:
    """The variables of the ranks, with what this environment has for those without a value.

    Raises:
        ConfigError: it has none.
    """
    if missing := [name for name, value in environment.items() if value is None and not os.environ.get(name)]:
        raise ConfigError(
            f"--env {', '.join(missing)}: not set in this environment; export {'it' if len(missing) == 1 else 'them'} "
            "first, or give NAME=VALUE"
        )
    return {name: os.environ[name] if value is None else value for name, value in environment.items()}


def _print_lines(args: argparse.Namespace, plan: Plan, flags: Sequence[str], hosts: Sequence[NodeHost]) -> None:
    options = _options_of_hosts(args, flags, hosts)
    console().print(launch_table(plan, hosts))
    are_made_up = not _hosts_given_by(args) and len(hosts) > 1
    missing = missing_flags(args.flags) if Path(args.program).name == PROGRAM else ()
    if are_made_up:
        print("\n# The names of hosts are made up: give yours with --hosts or --hostfile.")
    if missing:
        print(f"\n# Not complete: a plan does not imply {', '.join(missing)}, among others; give them after --.")
    for host in hosts:
        # On one line: what comes after it is pasted into a shell.
        print(f"\n{printable(f'# {host.title}: {host.devices}')}")
        print(options.shell_line(host, num_nodes=len(hosts)))
    answer(
        args,
        lambda: {
            "hosts": [{**_host_document(host), "command": options.words(host, num_nodes=len(hosts))} for host in hosts],
            "environment": options.environment,
            "hosts_are_made_up": are_made_up,
            "missing_flags": list(missing),
        },
    )


def _host_document(host: NodeHost) -> dict[str, Any]:
    return {
        "host": host.name,
        "node": host.node,
        "node_type": host.node_type.name,
        "device": host.node_type.device,
        "ranks": list(host.ranks),
    }


def _run(args: argparse.Namespace, cluster: ClusterSpec, flags: Sequence[str], hosts: Sequence[NodeHost]) -> int:
    if not _hosts_given_by(args) and len(hosts) > 1:
        raise ConfigError(f"--run: the plan needs {len(hosts)} hosts; name them with --hosts or --hostfile")
    options = _options_of_hosts(args, flags, hosts)
    environment = _values(options.environment)
    folder, ssh = str(Path.cwd()), DEFAULT_SSH if args.ssh is None else args.ssh
    check_hosts(hosts, options, plan=args.plan, folder=folder, ssh=ssh, devices=cluster.device_types)
    logs = args.logs or Path("launch-logs") / time.strftime("%Y%m%d-%H%M%S")
    make_folder(logs, asked_by="--logs")
    commands = []
    for host in hosts:
        words = options.words(host, num_nodes=len(hosts))
        text = watched(words, folder=folder, reads_variables=bool(environment))
        first_input = variables_line(environment) if environment else b""
        commands.append(HostCommand(host, tuple(command_on(host.name, text, ssh=ssh)), first_input))
    print(f"logs of {len(hosts)} host{'s' * (len(hosts) > 1)} in {logs}", flush=True)
    exit_code = run_on_hosts(commands, logs=logs, say=partial(print, flush=True))
    answer(args, lambda: {"logs": logs, "exit_code": exit_code})
    return exit_code


def _write_batch_script(args: argparse.Namespace, cluster: ClusterSpec, flags: Sequence[str]) -> int:
    environment = dict(args.env)
    script = batch_script(
        cluster,
        _words_in_job(args),
        flags=args.flags,
        environment=environment,
        sbatch_options=args.sbatch_option,
        made_by=args.command_line,
        site=site_at_hand(),
    )
    check_output(args.sbatch, asked_by="--sbatch")
    has_values = any(value is not None for value in environment.values())
    where = write_output(args.sbatch, script.text.encode(), is_private=has_values)
    for note in script.notes:
        sys.stderr.write(f"hetero: note: {printable(note)}\n")
    if args.sbatch != STDOUT:
        print(f"written to {where}; submit it with: sbatch {shlex.quote(where)}")
    answer(args, lambda: {"written_to": where})
    return 0


def _words_in_job(args: argparse.Namespace) -> list[str]:
    """This launch as a batch script has it, without variables and flags of the program."""
    given = {
        "--cluster": args.cluster,
        "--program": args.program if args.program != PROGRAM else None,
        "--torchrun": args.torchrun,
        "--master-addr": args.master_addr or None,
        "--master-port": args.master_port,
        "--numa-binding": args.numa_binding,
        "--logs": args.logs,
    }
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [sys.executable, "-m", "hetero", "launch", str(args.plan), *options]


def _in_allocation(
    args: argparse.Namespace, plan: Plan, cluster: ClusterSpec, flags: Sequence[str], job: SlurmJob
) -> int:
    """Print or run the srun step of Slurm's allocation."""
    # One task of "srun --pty bash" has the terminal; the shells of the others end at once.
    has_terminal = any(os.isatty(descriptor) for descriptor in range(3))
    if job.task is not None and job.task.num_tasks > 1 and not has_terminal:
        raise ConfigError(
            f"this is task {job.task.task} of the {job.task.num_tasks} of a step of Slurm; a launch starts a task on "
            "each node itself: run it once, in the job's script or shell, without srun"
        )
    nodes = place_nodes(cluster, allocated_nodes(job), hosts=args.hosts or (), components=args.components)
    words = step_words(job, nodes, _slurm_options(args, flags), cluster=cluster)
    if args.start:
        if args.json:
            raise ConfigError(
                "--json with --run in an allocation of Slurm: ranks write to the same output; leave it out"
            )
        environment = environment_for_srun({**os.environ, **_values(dict(args.env))})
        return run_step(job, words, environment, newest_saved=_newest_saved(flags) if goes_on(flags) else None)
    hosts = [each.host for each in nodes]
    console().print(launch_table(plan, hosts))
    print(f"\n{shell_text(words)}")
    answer(args, lambda: {"hosts": [_host_document(host) for host in hosts], "command": words})
    return 0


def _newest_saved(flags: Sequence[str]) -> Callable[[], int | None]:
    """What says which step is the newest in the folder of ``--save``, of which the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save", type=Path)
    folder = parser.parse_known_args(list(flags))[0].save
    return lambda: latest_step(folder)
