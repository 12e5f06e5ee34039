"""What ``hetero sweep`` does with the plans of its rows: emulates them, or makes them jobs of Slurm."""

import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetero.commands.measure import EmulatedPlan, emulated_run
from hetero.data.cost_models import plan_costs
from hetero.emulation.timeline import executed
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.launch.planned_flags import check_nothing_is_missing
from hetero.launch.sbatch_options import node_type_of
from hetero.launch.slurm_components import job_request
from hetero.plan.ir import Plan
from hetero.report.sweep_rows import SweepRow
from hetero.serialization import load, near_match
from hetero.spec.cluster import ClusterSpec
from hetero.sweep.combinations import Combination, digest
from hetero.sweep.folder import StoredEmulation, StoredJob, SweepFolder
from hetero.sweep.sweep_file import SweepEmulation, SweepLaunch, SweepSpec

Say = Callable[[str], None]


def check_mode(mode: str, spec: SweepSpec, combinations: Sequence[Combination], path: Path) -> None:
    """Check what a mode needs before anything is planned.

    Raises:
        ConfigError: a package, a program or a part of the sweep file is missing, or an option of sbatch is wrong.
    """
    if mode == "emulate":
        require("train", asked_by="--mode emulate")
    if mode not in ("scripts", "submit"):
        return
    if spec.launch is None:
        raise ConfigError(
            f"{path}: --mode {mode} needs the key 'launch', which says what a plan does not imply, such as "
            "launch: {flags: --data-path ... --train-iters 100}"
        )
    if spec.launch.program is None:
        try:
            check_nothing_is_missing(shlex.split(spec.launch.flags))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{path}: launch.flags: {error}") from None
    _check_sbatch_options(spec.launch.sbatch_options, {each.cluster_name: each.cluster for each in combinations}, path)
    if mode == "submit" and shutil.which("sbatch") is None:
        raise ConfigError("--mode submit needs Slurm's sbatch, which is not here; --mode scripts writes the scripts")


def emulate_rows(
    rows: Sequence[SweepRow],
    combinations: Sequence[Combination],
    folder: SweepFolder,
    options: SweepEmulation,
    say: Say,
) -> tuple[SweepRow, ...]:
    """The rows with their emulated steps; one plan after the other, as two would share this machine's processors."""
    return tuple(
        row if row.step_s is None else _emulated(row, each, folder, options, say)
        for row, each in zip(rows, combinations, strict=True)
    )


def _emulated(
    row: SweepRow, combination: Combination, folder: SweepFolder, options: SweepEmulation, say: Say
) -> SweepRow:
    if row.num_devices > options.most_ranks:
        why = f"not emulated: {row.num_devices} ranks, emulation.most_ranks is {options.most_ranks}"
        return dataclasses.replace(row, why_not_emulated=why)
    key = digest([row.key, dataclasses.astuple(options)])
    found = folder.emulation(key)
    if found is None:
        found = _run(row, combination, folder.plan_file(row.key), options)
        folder.keep_emulation(key, found)
        took = found.why_none or f"{found.step_s:.4g} s per step, predicted {row.step_s:.4g} s"
        say(f"emulated {row.place}: {took}")
    return dataclasses.replace(row, emulated_step_s=found.step_s, why_not_emulated=found.why_none)


def _run(row: SweepRow, combination: Combination, plan_file: Path, options: SweepEmulation) -> StoredEmulation:
    assert row.step_s is not None, "only such rows are emulated"
    asked = EmulatedPlan(
        plan=plan_file,
        cluster=combination.cluster_file,
        step_s=row.step_s,
        num_steps=options.steps,
        time_scale=options.time_scale,
        seq_length=options.seq_length,
        profiles=combination.profiles,
        data_sheets=combination.settings.data_sheets,
    )
    try:
        run = emulated_run(asked)
    except ConfigError as error:
        return StoredEmulation(why_none=f"not emulated: {error}")
    costs = plan_costs(
        load(Plan, plan_file), combination.cluster, profiles=asked.profiles, data_sheets=asked.data_sheets
    )
    return StoredEmulation(step_s=executed(run, costs).step_s)


def _check_sbatch_options(options: Sequence[str], clusters: Mapping[str, ClusterSpec], path: Path) -> None:
    where = f"{path}: launch.sbatch_options"
    known = list(dict.fromkeys(name for cluster in clusters.values() for name in _type_names(cluster)))
    for option in options:
        if (node_type := node_type_of(option)) not in ("", *known):
            hint = near_match(node_type, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{where}: {option}: no cluster of the sweep has a node type {node_type!r}{hint}")
    for name, cluster in clusters.items():
        try:
            job_request(cluster, _options_for(cluster, options), site=None)
        except ConfigError as error:
            raise ConfigError(f"{where}: cluster {name}: {error}") from None


def _type_names(cluster: ClusterSpec) -> list[str]:
    return [node_type.name for node_type in cluster.node_types]


def _options_for(cluster: ClusterSpec, options: Sequence[str]) -> list[str]:
    """Return the options of ``sbatch`` for all node types, and for those that a cluster has."""
    return [option for option in options if node_type_of(option) in ("", *_type_names(cluster))]


def write_jobs(
    rows: Sequence[SweepRow],
    combinations: Sequence[Combination],
    folder: SweepFolder,
    launch: SweepLaunch,
    *,
    submits: bool,
    say: Say,
) -> tuple[SweepRow, ...]:
    """Return the rows with the batch scripts of their plans, or with the jobs that Slurm made of them.

    All scripts are written before the first one is submitted. What was submitted before is not submitted again.

    Raises:
        ConfigError: a script cannot be made, or Slurm does not take it.
    """
    jobs = {row.key: job for row in rows if row.step_s is not None and (job := folder.job(row.key)) is not None}
    missing = {
        row.key: (row, combination)
        for row, combination in zip(rows, combinations, strict=True)
        if row.step_s is not None and row.key not in jobs
    }
    notes: set[str] = set()
    for row, combination in missing.values():
        for note in _write_script(row, combination, folder, launch):
            if note not in notes:
                say(f"{row.place}: {note}")
            notes.add(note)
    if submits:
        jobs |= _submitted([row for row, _ in missing.values()], folder, say)

    def made(row: SweepRow) -> str:
        return f"job {jobs[row.key].job_id}" if row.key in jobs else str(folder.script_file(row.key))

    return tuple(row if row.step_s is None else dataclasses.replace(row, job=made(row)) for row in rows)


def _write_script(row: SweepRow, combination: Combination, folder: SweepFolder, launch: SweepLaunch) -> list[str]:
    """Write the batch script of a plan, as ``hetero launch`` does; return what is said about it."""
    words = ["launch", str(folder.plan_file(row.key)), "--sbatch", str(folder.script_file(row.key))]
    for option in _options_for(combination.cluster, launch.sbatch_options):
        words += ["--sbatch-option", option]
    words += [] if launch.program is None else ["--program", launch.program]
    done = _ended([sys.executable, "-m", "hetero", *words, "--", *shlex.split(launch.flags)])
    if isinstance(done, str):
        raise ConfigError(f"{row.place}: no batch script: {done}")
    said = (line.removeprefix("hetero: ") for line in done.stderr.splitlines())
    return [line for line in said if line.startswith("note: ")]


def _submitted(rows: Sequence[SweepRow], folder: SweepFolder, say: Say) -> dict[str, StoredJob]:
    """Submit the scripts of rows; each job is stored as soon as Slurm has named it.

    Raises:
        ConfigError: Slurm does not take one; the message says which were submitted before.
    """
    jobs: dict[str, StoredJob] = {}
    for row in rows:
        done = _ended(["sbatch", "--parsable", str(folder.script_file(row.key))])
        if isinstance(done, str):
            numbers = ", ".join(job.job_id for job in jobs.values())
            before = f"; submitted before it: {len(jobs)} of {len(rows)} (job {numbers})" if jobs else ""
            raise ConfigError(f"{row.place}: not submitted: {done}{before}; the same command submits what is missing")
        # The name of the cluster may follow the number.
        jobs[row.key] = StoredJob(job_id=done.stdout.strip().partition(";")[0])
        folder.keep_job(row.key, jobs[row.key])
        say(f"submitted {row.place}: job {jobs[row.key].job_id}")
    return jobs


def _ended(command: Sequence[str]) -> "subprocess.CompletedProcess[str] | str":
    """Return a command that has ended well, or the last line of what it has said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return done
    *_, said = done.stderr.strip().splitlines() or [f"{command[0]} ended with {done.returncode}"]
    return said.removeprefix("hetero: ")
