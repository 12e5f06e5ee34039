"""Stages of a GPU run: what each shows, its command and its time limit, the most valuable first.

What no device has shown yet comes before what one has, so that a machine that is lent for minutes answers the open
questions first. ``docs/gpu_proofs.md`` says what has run where; the order here follows it.

Only the standard library is imported, so that names of stages are checked before anything is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_stages.target import Target

PROFILE_SECONDS = {"cuda": 30, "cpu": 5}
"""Budget of ``hetero profile run``, by device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One program of a run.

    shows: what its success shows, for the report.
    command: arguments of the environment's Python.
    limit_s: seconds after which the stage is killed with all its processes.
    is_alone: nothing else may run meanwhile, since it measures time or fills the device's memory.
    needs: an earlier stage without whose success this one cannot succeed.
    needs_engine: TransformerEngine has to be installed, which runs on CUDA alone.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    is_alone: bool = False
    needs: str | None = None
    needs_engine: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TestGroup:
    """Files of ``tests/gpu`` that run in one pytest process.

    files: none stands for all that no other group names, so that a file that is new runs, and runs early.
    first: pytest's expression for tests that no device has run yet. They get a stage of their own, and the others
        another one near the end of the run.
    has_run: a device has run all of it, so that it comes near the end.
    """

    __test__ = False

    name: str
    shows: str
    files: tuple[str, ...] = ()
    limit_s: float
    is_alone: bool = False
    needs: str | None = None
    first: str | None = None
    has_run: bool = False


SHARED_DEVICE = "shared-device"

TESTS = Path(__file__).parents[1] / "gpu"

TEST_GROUPS = (
    TestGroup(
        name="one-gpu",
        shows="losses, attention, gradient sums and weights on the GPU are those of a CPU",
        limit_s=200,
    ),
    TestGroup(
        name="groups",
        shows="groups have NCCL alone; a rank leaves while a receive is pending",
        files=("test_groups_on_gpu.py",),
        limit_s=120,
        needs=SHARED_DEVICE,
    ),
    TestGroup(
        name="overlap",
        shows="communication runs while the rank computes",
        files=("test_overlap.py",),
        limit_s=180,
        needs=SHARED_DEVICE,
    ),
    TestGroup(
        name="offload",
        shows="state on the host trains what the device would",
        files=("test_offload_on_gpu.py",),
        limit_s=300,
        needs=SHARED_DEVICE,
    ),
    TestGroup(
        name="ranks",
        shows="ranks that share the device train what one rank trains",
        files=("test_ranks_on_one_gpu.py",),
        limit_s=300,
        needs=SHARED_DEVICE,
        first="interleaved or tp2 or dp2 or unlike or delayed-bf16",
    ),
    TestGroup(
        name="half",
        shows="half precision is near fp32",
        files=("test_single_rank.py",),
        limit_s=300,
        first="moe",
    ),
    TestGroup(
        name="hot-loop",
        shows="no microbatch waits for the device; memory at the start is that of a step",
        files=("test_hot_loop.py",),
        limit_s=240,
        has_run=True,
    ),
    TestGroup(
        name="tools",
        shows="doctor, profiler and clocks measure the device",
        files=(
            *("test_doctor_on_gpu.py", "test_profile_run_on_gpu.py", "test_host_profile_on_gpu.py"),
            *("test_compute_seconds.py", "test_measured_step.py"),
        ),
        limit_s=240,
        # It measures times and the link between two ranks.
        is_alone=True,
        needs=SHARED_DEVICE,
    ),
    TestGroup(
        name="failures",
        shows="a rank that is killed or out of memory ends the others, by name",
        files=("test_failures_on_gpu.py",),
        limit_s=180,
        # It fills the device's memory.
        is_alone=True,
        needs=SHARED_DEVICE,
    ),
)


def list_stages(target: Target, out: str) -> tuple[Stage, ...]:
    """Return all stages in the order in which they run.

    out: folder of the run, where some stages leave files.
    """
    unseen = [_test_stage(group, group.first, "") for group in TEST_GROUPS if not group.has_run]
    seen = [_test_stage(group, f"not ({group.first})", "-seen") for group in TEST_GROUPS if group.first is not None]
    seen += [_test_stage(group, None, "") for group in TEST_GROUPS if group.has_run]
    seconds = PROFILE_SECONDS[target.device]
    return (
        Stage(
            name="doctor",
            shows="versions, device and settings, and what is wrong with them",
            command=("-m", "hetero", "doctor", "--json"),
            limit_s=60,
            is_alone=True,
        ),
        Stage(
            name=SHARED_DEVICE,
            shows="two ranks on one device exchange messages over NCCL",
            command=("-m", "tests.gpu_stages.shared_device", *target.options),
            limit_s=60,
            is_alone=True,
        ),
        _training("ramp-up", "the batch may grow during a run", target, limit_s=60),
        _training("experts", "experts compile nothing after their first step", target, limit_s=90),
        *(stage for stage in unseen if not stage.is_alone),
        *(stage for stage in unseen if stage.is_alone),
        Stage(
            name="profile",
            shows=f"what hetero profile run measures in {seconds} s",
            command=("-m", "tests.gpu_stages.profile_run", *target.options, "--seconds", str(seconds), "--out", out),
            limit_s=90,
            is_alone=True,
        ),
        _wide("wide-local", target, out),
        _wide("wide-engine", target, out),
        _bench("bench-local", target),
        _bench("bench-engine", target),
        Stage(
            name="steps",
            shows="step time and memory of one rank, and their prediction",
            command=("-m", "tests.gpu_stages.measured_steps", *target.options),
            limit_s=240,
            is_alone=True,
        ),
        _training("two-ranks", "pp 2, dp 2 and tp 2 have one rank's losses", target, limit_s=150, needs=SHARED_DEVICE),
        _training("precision", "ten steps in half precision are near fp32", target, limit_s=120),
        *seen,
    )


def _training(name: str, shows: str, target: Target, *, limit_s: float, needs: str | None = None) -> Stage:
    """Return a stage of :mod:`tests.gpu_stages.trainings`."""
    command = ("-m", "tests.gpu_stages.trainings", name, *target.options)
    return Stage(name=name, shows=shows, command=command, limit_s=limit_s, needs=needs)


def _wide(name: str, target: Target, out: str) -> Stage:
    """Return the stage that measures the step of 8 layers of Llama 3 8B, and predicts it by the profiles in ``out``."""
    needs_engine = name == "wide-engine"
    return Stage(
        name=name,
        shows=f"step of 8 layers of Llama 3 8B, {'TransformerEngine' if needs_engine else 'local'} layers",
        command=("-m", "tests.gpu_stages.wide_step", name.removeprefix("wide-"), *target.options, "--out", out),
        limit_s=100,
        is_alone=True,
        needs_engine=needs_engine,
    )


def _bench(name: str, target: Target) -> Stage:
    """Return the stage that compares step times with stock megatron-core's."""
    needs_engine = name == "bench-engine"
    on_cuda = target.device == "cuda"
    sizes = (
        ("--layers", "12", "--hidden", "1024", "--seq", "1024", "--microbatches", "8", "--steps", "3", "--turns", "6")
        if on_cuda
        else ("--layers", "1", "--hidden", "64", "--seq", "16", "--microbatches", "1", "--turns", "1")
    )
    precision = "bf16" if on_cuda and target.half == "bf16" else "fp32"
    layers = "auto" if needs_engine else "local"
    options = ("--device", target.device, "--precision", precision, "--transformer-impl", layers, "--plans", "1 rank")
    return Stage(
        name=name,
        shows=f"step time and stock megatron-core's, {'TransformerEngine' if needs_engine else 'local'} layers",
        command=("-m", "tests.bench.bench_uniform", *sizes, *options),
        limit_s=120,
        is_alone=True,
        needs_engine=needs_engine,
    )


def files_of(group: TestGroup) -> tuple[str, ...]:
    """Return the names of the files of ``group``."""
    named = {file for each in TEST_GROUPS for file in each.files}
    return group.files or tuple(sorted(path.name for path in TESTS.glob("test_*.py") if path.name not in named))


def _test_stage(group: TestGroup, keyword: str | None, suffix: str) -> Stage:
    """Return the stage of a group, or of its tests that ``keyword`` selects."""
    name = f"tests-{group.name}{suffix}"
    pytest = ("-m", "pytest", "-m", "gpu", "--all", "-v", "--tb=short", "-p", "no:cacheprovider")
    selected = ("-k", keyword) if keyword is not None else ()
    return Stage(
        name=name,
        shows=group.shows,
        command=(
            *pytest,
            "-p",
            "tests.gpu_stages.outcomes",
            *selected,
            *(f"tests/gpu/{file}" for file in files_of(group)),
        ),
        limit_s=group.limit_s,
        is_alone=group.is_alone,
        needs=group.needs,
    )


def select_stages(stages: Sequence[Stage], names: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages called ``names``, each once, in the order of ``names``; all where there are none.

    Raises:
        ValueError: a name is of no stage.
    """
    by_name = {stage.name: stage for stage in stages}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"--stages {' '.join(unknown)}: no such stage; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names)) if names else tuple(stages)
