"""What ``hetero sweep`` does with the plans of its rows: emulates them, or makes them jobs of Slurm."""

import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hetero.commands.measure import EmulatedPlan, emulated_run
from hetero.data.cost_models import plan_costs
from hetero.emulation.timeline import executed
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.launch.planned_flags import check_nothing_is_missing
from hetero.plan.ir import Plan
from hetero.report.sweep_rows import SweepRow
from hetero.serialization import load
from hetero.sweep.combinations import Combination, digest
from hetero.sweep.folder import StoredEmulation, StoredJob, SweepFolder
from hetero.sweep.sweep_file import SweepEmulation, SweepLaunch, SweepSpec

Say = Callable[[str], None]


def check_mode(mode: str, spec: SweepSpec, path: Path) -> None:
    """Check what a mode needs before anything is planned.

    Raises:
        ConfigError: a package, a program or a part of the sweep file is missing.
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


def write_jobs(
    rows: Sequence[SweepRow], folder: SweepFolder, launch: SweepLaunch, *, submits: bool, say: Say
) -> tuple[SweepRow, ...]:
    """The rows with the batch scripts of their plans, which ``hetero launch`` writes, and the jobs that Slurm made of
    them; what was submitted before is not submitted again.

    Raises:
        ConfigError: a script cannot be made, or Slurm does not take it.
    """
    return tuple(row if row.step_s is None else _job(row, folder, launch, submits, say) for row in rows)


def _job(row: SweepRow, folder: SweepFolder, launch: SweepLaunch, submits: bool, say: Say) -> SweepRow:
    if (before := folder.job(row.key)) is not None:
        return dataclasses.replace(row, job=f"job {before.job_id}")
    script = folder.script_file(row.key)
    words = ["launch", str(folder.plan_file(row.key)), "--sbatch", str(script)]
    words += [word for option in launch.sbatch_options for word in ("--sbatch-option", option)]
    words += [] if launch.program is None else ["--program", launch.program]
    _ended([sys.executable, "-m", "hetero", *words, "--", *shlex.split(launch.flags)], f"{row.place}: no batch script")
    if not submits:
        return dataclasses.replace(row, job=str(script))
    said = _ended(["sbatch", "--parsable", str(script)], f"{row.place}: not submitted")
    # The name of the cluster may stand behind the number.
    job = StoredJob(job_id=said.strip().partition(";")[0])
    folder.keep_job(row.key, job)
    say(f"submitted {row.place}: job {job.job_id}")
    return dataclasses.replace(row, job=f"job {job.job_id}")


def _ended(command: Sequence[str], what: str) -> str:
    """The output of a program that ended well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        *_, said = done.stderr.strip().splitlines() or [f"{command[0]} ended with {done.returncode}"]
        raise ConfigError(f"{what}: {said.removeprefix('hetero: ')}")
    return done.stdout
