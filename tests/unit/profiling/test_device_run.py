"""A run over the points of a device: its budget, its order, and what does not fit; each point is made up."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero.doctor.facts import HostFacts
from hetero.errors import ConfigError
from hetero.profiling import device_run
from hetero.profiling.device_run import ProfiledDevice, keep_busy, measure_device
from hetero.profiling.measure_point import MeasuredPoint, Share
from hetero.profiling.points import ProfilePoint
from hetero.profiling.run_options import add_run_options, check_run_options
from hetero.serialization import load, save
from hetero.spec.devices import DeviceType
from hetero.spec.profile import LayerTime, Profile, RecomputedTime, SplitBackwardTime, UpdateTime
from tests.helpers.models import gpt2_model
from tests.unit.profiling.test_repetitions import FakeClock

BUILD_S = 1.0


class MadeUp:
    """Takes the place of :func:`measure_point`: seconds that grow with the cost of a point, by a clock of its own."""

    def __init__(self, clock: FakeClock, *, repetition_s: float = 0.01, most_samples: int = 1000) -> None:
        self.clock, self.repetition_s, self.most_samples = clock, repetition_s, most_samples
        self.seen: list[ProfilePoint] = []
        self.shares: list[Share] = []

    def __call__(self, point: ProfilePoint, profiled: object, *, share: Share, **_: object) -> MeasuredPoint | None:
        self.seen.append(point)
        self.shares.append(share)
        self.clock.now_s += BUILD_S
        if point.micro_batch_size > self.most_samples:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.50 "
                "GiB is free. Including non-PyTorch memory, this process has 14.27 GiB memory in use."
            )
        one_s = self.repetition_s * point.relative_cost
        if 4 * one_s > share.longest_s - BUILD_S:
            self.clock.now_s += one_s
            return None
        self.clock.now_s += max(share.seconds, 4 * one_s)
        where = {"tp": point.tp, "micro_batch_size": point.micro_batch_size}
        match point.what:
            case "update":
                measured = UpdateTime(kind=point.kind, tp=point.tp, update_s=one_s)  # type: ignore[arg-type]
            case "split":
                measured = SplitBackwardTime(input_gradients_s=one_s, weight_gradients_s=one_s, **where)
            case "passes":
                measured = LayerTime(kind=point.kind, forward_s=one_s, backward_s=one_s, **where)
            case recompute:
                measured = RecomputedTime(recompute=recompute, forward_s=one_s, backward_s=one_s, **where)
        return MeasuredPoint(measured, None, one_s, "made up")


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
        monkeypatch.setattr(device_run, "measure_point", made_up)
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
    assert len(made_up.seen) == len(set(made_up.seen)) == 8 * 8 + 3 * 2
    assert said[0] == ("Abacus 3000 (beads): 70 of 70 points are to be measured, the most telling first, in 1e+06 s")
    assert max(share.seconds for share in made_up.shares) == device_run.MOST_S
    profile = load(Profile, path)
    assert (profile.device, profile.model, profile.provenance.hardware) == ("Abacus 3000", "tiny", "beads")
    assert (profile.provenance.date, profile.provenance.command) == ("2026-01-31", "as it was typed")
    assert not profile.tp_collectives_included
    assert said[-2:] == [f"{path}: 70 of 70 points", f"hetero plan --profile {path} ..."]


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [5, 30, 100])
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
    short = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.50 GiB is free"
    assert f"block, tp 1, microbatch 8: does not fit in the memory of the device, and is left out; {short}" in said


def test_a_block_and_its_update_are_measured_whatever_it_takes(run: Run) -> None:
    """No plan can do without."""
    made_up = MadeUp(FakeClock(), repetition_s=10.0)
    (path,), said = run(made_up, "--budget-seconds", "3", "--tp", "1")
    assert [str(each) for each in made_up.seen] == ["block, tp 1, microbatch 2", "update of block, tp 1"]
    assert (len(load(Profile, path).times), len(load(Profile, path).updates)) == (1, 1)
    assert said[-2] == f"{path}: 2 of 35 points; 33 are left, for which the same command goes on"


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
    keep_busy(args, on, date="2026-01-31", is_over=lambda: len(busy.seen) == 3)
    assert not list(tmp_path.glob("*.local.json"))
    measure_device(*prepare(measuring), date="2026-01-31", say=lambda _: None, clock=measuring.clock)
    assert busy.seen == 3 * measuring.seen[:1]


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
