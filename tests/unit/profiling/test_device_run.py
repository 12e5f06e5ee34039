"""A run over the points of a device: its budget, its order, and what does not fit; the parts that run are played."""

import argparse
import dataclasses
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.distributed.process_groups import ParallelContext
from hetero.doctor.facts import HostFacts
from hetero.errors import ConfigError
from hetero.plan.ir import Stage
from hetero.profiling import built_parts, device_run, laps
from hetero.profiling.device_run import keep_busy, measure_device
from hetero.profiling.measure_point import MeasuredPoint, Share, measure_point
from hetero.profiling.points import ProfilePoint
from hetero.profiling.requested_profiles import ProfiledDevice
from hetero.profiling.run_options import add_run_options, check_run_options
from hetero.runtime.options import StageOptions
from hetero.serialization import load, save
from hetero.spec.devices import DeviceType
from hetero.spec.profile import ModuleKind, Profile
from tests.helpers.models import gpt2_model
from tests.unit.profiling.test_repetitions import FakeClock

BUILD_S = 1.0


class MadeUp:
    """Plays the parts of a model: their passes take seconds that grow with the cost of a point, by its own clock.

    build_s: seconds to build a part, by its kind.
    compile_s: seconds to compile the fused functions of a block or half of one, for each size that is new.
    most_samples: more in a microbatch do not fit in the memory.
    most_parts: more cannot be on the device at a time.
    """

    def __init__(
        self,
        clock: FakeClock,
        *,
        repetition_s: float = 0.01,
        build_s: Callable[[str, StageOptions], float] = lambda kind, options: BUILD_S,
        compile_s: float = 0.0,
        most_samples: int = 1000,
        most_parts: int = 1000,
        attention: str = "cudnn",
    ) -> None:
        self.clock, self.repetition_s, self.compile_s = clock, repetition_s, compile_s
        self.build_s, self.most_samples, self.most_parts, self.attention = build_s, most_samples, most_parts, attention
        self.compiled: set[tuple[int, float, bool]] = set()
        self.built: list[tuple[int, str, str]] = []
        self.alive: weakref.WeakSet[PlayedPart] = weakref.WeakSet()
        self.visits: list[ProfilePoint] = []
        self.shares: list[Share] = []

    @property
    def seen(self) -> list[ProfilePoint]:
        """What was measured, each point once."""
        return list(dict.fromkeys(self.visits))

    def build(self, context: ParallelContext, kind: ModuleKind, *, options: StageOptions) -> "PlayedPart":
        (work,) = context.stages
        part = PlayedPart(self, kind, work.stage)
        self.built.append((work.stage.tp, kind, part.sort))
        self.clock.now_s += self.build_s(kind, options)
        self.alive.add(part)
        if len(self.alive) > self.most_parts:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return part

    def measure(self, point: ProfilePoint, part: Any, *, share: Share, **arguments: Any) -> MeasuredPoint | None:
        """Note what is measured, and measure it."""
        self.visits.append(point)
        self.shares.append(share)
        return measure_point(point, part, share=share, **arguments)


class PlayedPart:
    parameters = 1000
    output_bytes = 64

    def __init__(self, made_up: MadeUp, kind: str, stage: Stage) -> None:
        self.made_up, self.kind, self.tp, self.size = made_up, kind, stage.tp, 0
        self.sort = "split" if stage.wgrad_delay is not None else stage.recompute
        self.attention = made_up.attention if kind in ("block", "attention") else None

    def take_turn(self, *, micro_batch_size: int) -> None:
        self.size = micro_batch_size

    def pass_for(self, share: float) -> None:
        if self.size > self.made_up.most_samples:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.50 "
                "GiB is free. Including non-PyTorch memory, this process has 14.27 GiB memory in use."
            )
        self.made_up.clock.now_s += share * self.made_up.repetition_s * self.size / self.tp

    def forward(self) -> None:
        # A forward without a graph, as full recomputation has it, is another function for the compiler.
        key = self.size, self.tp, self.sort == "full"
        if self.made_up.compile_s and self.kind not in ("embedding", "head") and key not in self.made_up.compiled:
            self.made_up.compiled.add(key)
            self.made_up.clock.now_s += self.made_up.compile_s
        self.pass_for(0.25)

    def backward(self) -> None:
        self.pass_for(0.75)

    def weight_gradients(self) -> None:
        self.pass_for(0.25)

    def update(self) -> None:
        self.pass_for(1.0)

    def saved_bytes(self) -> int:
        self.forward()
        return 100 * self.size


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    save(gpt2_model(), path)
    return path


Prepare = Callable[..., tuple[argparse.Namespace, ProfiledDevice]]
Run = Callable[..., tuple[list[Path], list[str]]]


@pytest.fixture
def prepare(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """What is measured with some flags, by ``made_up``."""

    def prepare(made_up: MadeUp, *flags: str) -> tuple[argparse.Namespace, ProfiledDevice]:
        parser = argparse.ArgumentParser()
        add_run_options(parser)
        args = parser.parse_args(["--model", str(model_file), "--out", str(tmp_path), *flags])
        check_run_options(args)
        args.command_line = "as it was typed"
        monkeypatch.setattr(device_run, "measure_point", made_up.measure)
        monkeypatch.setattr(built_parts, "StagePart", made_up.build)
        monkeypatch.setattr(laps, "num_compiled_graphs", lambda: len(made_up.compiled))
        on = ProfiledDevice(
            device=torch.device("cpu"),
            type=DeviceType(name="Abacus 3000"),
            hardware="beads",
            node="here",
            facts=HostFacts(host="here", os="any", python="3"),
        )
        return args, on

    return prepare


@pytest.fixture
def run(prepare: Prepare) -> Run:
    def run(made_up: MadeUp, *flags: str) -> tuple[list[Path], list[str]]:
        said: list[str] = []
        paths = measure_device(*prepare(made_up, *flags), date="2026-01-31", say=said.append, clock=made_up.clock)
        return paths, said

    return run


def test_every_point_is_measured_once_if_there_is_time(run: Run) -> None:
    made_up = MadeUp(FakeClock())
    (path,), said = run(made_up, "--budget-seconds", "1e6", "--tp", "1", "2")
    assert path.name == "tiny.abacus-3000.fp32.local.json"
    assert len(made_up.seen) == 8 * 8 + 3 * 2
    assert said[0] == ("Abacus 3000 (beads): 70 of 70 points are to be measured, the most telling first, in 1e+06 s")
    assert max(share.seconds for share in made_up.shares) == device_run.MOST_S
    profile = load(Profile, path)
    assert (profile.device, profile.model, profile.provenance.hardware) == ("Abacus 3000", "tiny", "beads")
    assert (profile.provenance.date, profile.provenance.command) == ("2026-01-31", "as it was typed")
    assert not profile.tp_collectives_included
    # A block and its update have their share at once; everything else is measured a few times, and then again.
    times = [*profile.times, *profile.recomputed, *profile.split_backwards, *profile.updates]
    assert len(times) == 70
    assert len(made_up.visits) == 70 + 70 - 2
    assert min(each.repetitions or 0 for each in times) >= 18, "3 s, at 160 ms for the largest"
    assert said[-2:] == [f"{path}: 70 of 70 points", f"hetero plan --profile {path} ..."]


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [5, 15, 30])
def test_the_budget_is_kept_and_the_next_run_goes_on(run: Run, budget_s: int) -> None:
    """By no more than what it takes to build one point."""
    clock = FakeClock()
    first = MadeUp(clock)
    (path,), _ = run(first, "--budget-seconds", str(budget_s))
    assert clock.now_s - 1000 < budget_s + 2 * BUILD_S
    done = {each for each in first.seen if each.is_in(load(Profile, path))}
    assert 0 < len(done) < 100
    second = MadeUp(clock)
    _, said = run(second, "--budget-seconds", "1e6")
    assert not done & {*second.seen}
    assert f"{len(second.seen)} of {len(done) + len(second.seen)} points are to be measured" in said[0]
    third = MadeUp(clock)
    run(third, "--budget-seconds", "10")
    assert third.seen == []
    assert load(Profile, path).times


def test_what_is_too_slow_for_the_rest_of_the_budget_is_left_for_what_is_not(run: Run) -> None:
    """Half a second per sample: a microbatch of 8 would take 16 s of the 20."""
    clock = FakeClock()
    made_up = MadeUp(clock, repetition_s=0.5)
    run(made_up, "--budget-seconds", "20", "--tp", "1", "--recompute", "none")
    assert clock.now_s - 1000 < 22
    blocks = [each.micro_batch_size for each in made_up.seen if (each.what, each.kind) == ("passes", "block")]
    assert 2 in blocks
    assert 8 not in blocks


def test_what_does_not_fit_ends_its_series_alone(run: Run) -> None:
    made_up = MadeUp(FakeClock(), most_samples=4)
    (path,), said = run(made_up, "--budget-seconds", "1e6", "--tp", "1")
    assert {time.micro_batch_size for time in load(Profile, path).times} == {1, 2, 4}
    assert said[-2].startswith("  do not fit in the memory of the device: block (tp 1: microbatch 8); ")
    assert not [line for line in said if "no time" in line]
    short = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.50 GiB is free"
    assert f"block, tp 1, microbatch 8: does not fit in the memory of the device, and is left out; {short}" in said


def test_a_block_and_its_update_are_measured_whatever_it_takes(run: Run) -> None:
    """No plan can do without."""
    made_up = MadeUp(FakeClock(), repetition_s=10.0)
    (path,), said = run(made_up, "--budget-seconds", "3", "--tp", "1")
    assert [str(each) for each in made_up.seen] == ["block, tp 1, microbatch 2", "update of block, tp 1"]
    assert (len(load(Profile, path).times), len(load(Profile, path).updates)) == (1, 1)
    assert said[-4] == f"{path}: 2 of 35 points"
    assert said[-3].startswith("  there was no time for head (tp 1: microbatch 1, 2, 4, 8); embedding (tp 1: ")
    for words in ("; block (tp 1: microbatch 1, 4, 8); ", "; update of head (tp 1); update of embedding (tp 1)"):
        assert words in said[-3]
    # Ten seconds a sample: 103 samples of passes six times, 15 of split backwards and two updates four times; and
    # half a second of preparation for each point, of which of two one was built and one was there.
    needed_s = 10 * (103 * 6 + (15 + 2) * 4) + 33 * BUILD_S / 2
    assert said[-2] == (
        "the same command goes on with what there was no time for; --budget-seconds "
        f"{math.ceil(needed_s)} is about enough"
    )


def test_the_time_that_is_still_needed_is_that_of_all_profiles(run: Run, tmp_path: Path) -> None:
    """One command measures them, within one budget."""

    def needed_s(*precisions: str) -> int:
        made_up, folder = MadeUp(FakeClock(), repetition_s=10.0), tmp_path / "".join(precisions)
        folder.mkdir()
        flags = ("--budget-seconds", "3", "--tp", "1", "--out", str(folder))
        _, said = run(made_up, *flags, "--precision", *precisions)
        (found,) = (re.search(r"--budget-seconds (\d+) is about enough", line) for line in said if "enough" in line)
        assert found is not None
        return int(found[1])

    assert needed_s("fp32", "bf16") == pytest.approx(2 * needed_s("fp32"), rel=0.01)


ONE_RANK = ("--tp", "1", "--micro-batch-size", "1", "2")

ELEMENTS = {"block": 218e6, "attention": 42e6, "mlp": 176e6, "embedding": 743e6, "head": 743e6}
"""Of the parts of Llama 3 8B, a layer beside the ends."""


def test_thirty_seconds_are_enough_for_every_point_of_a_wide_layer(run: Run) -> None:
    """Played after an H200: a lap takes 10 ms a sample, drawing weights 10 ns an element, compiling 3 s a size.

    Embedding and head took 7 to 8 s each there, and 4 of these 17 points were measured in 28 s.
    """

    def build_s(kind: str, options: StageOptions) -> float:
        return 0.5 + (1e-8 * ELEMENTS[kind] if options.init_method_std is not None else 0.0)

    made_up = MadeUp(FakeClock(), build_s=build_s, compile_s=3.0)
    (path,), said = run(made_up, "--budget-seconds", "30", *ONE_RANK, "--recompute", "none", "full")
    assert f"{path}: 17 of 17 points" in said
    assert made_up.clock.now_s - 1000 < 30.5
    assert len(made_up.built) == len(set(made_up.built)) == 7, "each part once: full and split blocks are other ones"
    profile = load(Profile, path)
    assert all(time.forward_s == pytest.approx(0.0025 * time.micro_batch_size) for time in profile.times)
    assert {time.forward_spread for time in profile.times} == {0.0}, "compiling counts for no lap"
    assert min(each.repetitions or 0 for each in (*profile.times, *profile.updates)) > 10


def test_compiling_does_not_make_a_point_look_too_slow(run: Run) -> None:
    """Compiling takes 4 s of the last 5, and the three laps 30 ms."""
    made_up = MadeUp(FakeClock(), compile_s=4.0)
    (path,), _ = run(made_up, "--budget-seconds", "14", *ONE_RANK, "--recompute", "none")
    assert {time.micro_batch_size for time in load(Profile, path).times if time.kind == "block"} == {1, 2}


def test_parts_make_room_for_a_point_that_has_none_beside_them(run: Run) -> None:
    """Two parts fit in the memory; every point is measured all the same, and none is said to be too large."""
    made_up = MadeUp(FakeClock(), most_parts=2)
    (path,), said = run(made_up, "--budget-seconds", "1e6", "--tp", "1")
    assert f"{path}: 35 of 35 points" in said
    assert not [line for line in said if "not fit" in line]


@pytest.mark.parametrize("room", [0, 2])
def test_parts_are_kept_as_far_as_there_is_room(run: Run, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that was taken always."""
    monkeypatch.setattr(built_parts, "memory_bytes", lambda: room * 4 * 18 * PlayedPart.parameters)
    most = 0

    class Watched(MadeUp):
        def measure(self, *args: Any, **arguments: Any) -> MeasuredPoint | None:
            nonlocal most
            most = max(most, len(self.alive))
            return super().measure(*args, **arguments)

    run(Watched(FakeClock()), "--budget-seconds", "1e6", "--tp", "1")
    assert most == max(room, 1)


def test_a_profile_names_the_kernel_that_ran(run: Run) -> None:
    """Also when it goes on, and where another one ran it has a note."""
    flags = ("--budget-seconds", "1e6", "--recompute", "none", "--micro-batch-size", "1")
    (path,), _ = run(MadeUp(FakeClock(), attention="cudnn"), "--tp", "1", *flags)
    first = load(Profile, path)
    assert first.implementation.attention == "cudnn"
    run(MadeUp(FakeClock(), attention="unfused"), "--tp", "1", "2", *flags)
    both = load(Profile, path)
    assert both.implementation.attention == "cudnn"
    assert "attention ran by the kernel unfused in kind block, tp 2, micro_batch_size 1" in both.provenance.notes
    assert not [note for note in first.provenance.notes if "attention" in note]


def test_a_device_that_holds_no_block_is_told(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"block, tp 1, microbatch 2, and all .* does not fit in the memory"):
        run(MadeUp(FakeClock(), most_samples=0), "--budget-seconds", "1e6", "--tp", "1")


def test_each_precision_has_a_file(run: Run) -> None:
    paths, said = run(MadeUp(FakeClock()), "--budget-seconds", "1e6", "--tp", "1", "--precision", "fp32", "bf16")
    assert [load(Profile, path).arithmetic for path in paths] == ["fp32", "bf16"]
    assert said[1].startswith("[1/70] fp32 local: block, tp 1, microbatch 2: ")
    assert said[2].startswith("[2/70] bf16 local: block, tp 1, microbatch 2: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "3"], "tp 3, microbatch 1, fp32: "),
        (["--tp", "0"], "--tp has 0, must be at least 1"),
        (["--micro-batch-size", "-1"], "--micro-batch-size has -1, must be at least 1"),
        (["--budget-seconds", "0"], "--budget-seconds is 0, must be above 0"),
        (["--hidden-dropout", "1"], "--hidden-dropout is 1, must be at least 0 and below 1"),
        (["--transformer-impl", "auto", "local"], "--transformer-impl: auto and local are the same layers here"),
        (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine: "),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_is_measured(run: Run, flags: list[str], said: str) -> None:
    made_up = MadeUp(FakeClock())
    with pytest.raises(ConfigError) as raised:
        run(made_up, *flags)
    assert str(raised.value).startswith(said)
    assert made_up.seen == []


def test_who_measures_nothing_computes_until_others_have_measured(prepare: Prepare, tmp_path: Path) -> None:
    """What they measure first, and writes nothing."""
    measuring, busy = MadeUp(FakeClock()), MadeUp(FakeClock())
    args, on = prepare(busy)
    keep_busy(args, on, date="2026-01-31", is_over=lambda: len(busy.visits) == 3, clock=busy.clock)
    assert not list(tmp_path.glob("*.local.json"))
    measure_device(*prepare(measuring), date="2026-01-31", say=lambda _: None, clock=measuring.clock)
    assert busy.visits == 3 * measuring.seen[:1]
    assert len(busy.built) == 1


def test_who_has_no_room_to_compute_waits(prepare: Prepare) -> None:
    busy = MadeUp(FakeClock(), most_samples=0)
    keep_busy(*prepare(busy), date="2026-01-31", is_over=lambda: False)
    assert len(busy.seen) == 1


def test_a_profile_says_whether_others_computed_beside_it(prepare: Prepare) -> None:
    for num_beside, words in ((0, "no other device was made to"), (1, "1 other device of the"), (7, "7 other devices")):
        made_up = MadeUp(FakeClock())
        args, on = prepare(made_up)
        args.out = args.model.parent / f"beside_{num_beside}"
        args.out.mkdir()
        on = dataclasses.replace(on, num_beside=num_beside)
        (path,) = measure_device(args, on, date="2026-01-31", say=lambda _: None, clock=made_up.clock)
        assert any(note.startswith(words) for note in load(Profile, path).provenance.notes)
