"""Turns a sweep file into its combinations, checked as far as that goes before anything is planned."""

import hashlib
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hetero.cost.runtime_model import HETERO
from hetero.data.cost_models import model_costs
from hetero.data.presets import is_name, preset_path
from hetero.errors import ConfigError
from hetero.plan.ir import DEFAULT_DROPOUT, Precision
from hetero.planner.problem import Goal, Problem
from hetero.report.sweep_rows import SweepPlace
from hetero.serialization import checked, load, parse_json, read_bytes, read_text, read_yaml, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import load_model
from hetero.sweep.sweep_file import SweepGrid, SweepSettings, SweepSpec
from hetero.version import VERSION

KEY_CHARACTERS = 16
"""Of a digest in hexadecimal: 64 bits tell any number of combinations apart."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One question of a sweep.

    cluster_name, model_name: as the sweep file has them, without folder and suffix.
    cluster_file, model_file, profiles: where they lie.
    """

    cluster_name: str
    model_name: str
    cluster_file: Path
    model_file: Path
    cluster: ClusterSpec
    model: ModelSpec
    global_batch_size: int
    seq_length: int
    precision: Precision
    objective: Goal
    settings: SweepSettings
    profiles: tuple[Path, ...]

    @cached_property
    def key(self) -> str:
        """Digest of all that the outcome depends on: the inputs' contents, not their names, and the version."""
        asked = {
            "version": VERSION,
            "cluster": to_json(self.cluster),
            "model": to_json(self.model),
            "settings": to_json(self.settings),
            "profiles": [hashlib.sha256(read_bytes(path)).hexdigest() for path in self.profiles],
            "batch": [self.global_batch_size, self.seq_length, self.precision, self.objective],
        }
        return digest(asked)

    @property
    def place(self) -> SweepPlace:
        """What tells it apart from the others of the sweep."""
        return SweepPlace(
            cluster=self.cluster_name,
            model=self.model_name,
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
            precision=self.precision,
            objective=self.objective,
        )

    @property
    def command(self) -> str:
        """The line of ``hetero plan`` that asks the same."""
        settings = self.settings
        words = ["hetero", "plan", "--cluster", self.cluster_file, "--model", self.model_file]
        words += ["--global-batch-size", self.global_batch_size, "--seq-length", self.seq_length]
        words += ["--precision", self.precision, "--objective", self.objective, "--seed", settings.seed]
        words += ["--time-limit", f"{settings.time_limit_s:g}"]
        words += [word for path in self.profiles for word in ("--profile", path)]
        switches = {
            "--data-sheets": settings.data_sheets,
            "--use-distributed-optimizer": settings.distributed_optimizer,
            "--fp8": settings.fp8,
        }
        return shlex.join(map(str, [*words, *(flag for flag, is_on in switches.items() if is_on)]))

    def problem(self) -> Problem:
        """The question to the planner.

        Raises:
            ConfigError: what was asked contradicts itself, such as a goal of money without prices.
        """
        costs = model_costs(
            self.model,
            seq_length=self.seq_length,
            precision=self.precision,
            profiles=self.profiles,
            data_sheets=self.settings.data_sheets,
            runtime=HETERO.with_dropout(hidden=DEFAULT_DROPOUT, attention=DEFAULT_DROPOUT),
            where=self.cluster,
        )
        return Problem(
            cluster=self.cluster,
            costs=costs,
            global_batch_size=self.global_batch_size,
            distributed_optimizer=self.settings.distributed_optimizer,
            hidden_dropout=DEFAULT_DROPOUT,
            attention_dropout=DEFAULT_DROPOUT,
            goal=self.objective,
            time_limit_s=self.settings.time_limit_s,
            seed=self.settings.seed,
            fp8=self.settings.fp8,
        )


def digest(value: Any) -> str:
    """A short digest of plain data."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:KEY_CHARACTERS]


def read_sweep(path: Path) -> tuple[SweepSpec, tuple[Combination, ...]]:
    """Read a sweep file with all that it names, and look at every combination without planning it.

    Raises:
        ConfigError: names everything that is wrong with the file, with the clusters and models that it names, and with
            single combinations.
    """
    data = parse_json(read_text(path), source=str(path)) if path.suffix == ".json" else read_yaml(path)
    problems: list[str] = []
    spec: SweepSpec | None = None
    try:
        spec = checked(SweepSpec, data, source=str(path))
    except ConfigError as error:
        problems.append(str(error))
    clusters = _Files("cluster", path.parent, problems)
    models = _Files("model", path.parent, problems)
    for grid in _grids_of(data):
        clusters.load_all(grid.get("clusters"))
        models.load_all(grid.get("models"))
    if spec is None or problems:
        raise _told_at_once(path, problems)
    combinations = tuple(
        each for grid in spec.grids for each in _of_grid(grid, spec.settings, clusters, models, path.parent)
    )
    problems += _problems_of(combinations)
    if problems:
        raise _told_at_once(path, problems)
    return spec, combinations


def _told_at_once(path: Path, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0] if problems[0].startswith(str(path)) else f"{path}: {problems[0]}")
    lines = "".join(f"\n  {problem.removeprefix(f'{path}: ')}" for problem in problems)
    return ConfigError(f"{path}: {len(problems)} things are wrong with it, nothing was planned:{lines}")


def _grids_of(data: Any) -> Iterator[Mapping[str, Any]]:
    """The grids of a file that may be wrong in any way."""
    grids = data.get("grids") if isinstance(data, dict) else None
    yield from (grid for grid in (grids if isinstance(grids, list) else ()) if isinstance(grid, dict))


class _Files:
    """Loads each cluster or model of a sweep once, and collects what is wrong with them."""

    def __init__(self, kind: Literal["cluster", "model"], folder: Path, problems: list[str]) -> None:
        self._kind: Literal["cluster", "model"] = kind
        self._folder = folder
        self._problems = problems
        self._loaded: dict[str, tuple[Path, ClusterSpec | ModelSpec] | None] = {}

    def load_all(self, names: Any) -> None:
        """Load what a list has of texts; whatever else it is has been refused already."""
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and name not in self._loaded:
                self._loaded[name] = self._load(name)

    def _load(self, name: str) -> tuple[Path, ClusterSpec | ModelSpec] | None:
        try:
            path = preset_path(self._kind, name) if is_name(name) else self._folder / Path(name).expanduser()
            return path, load(ClusterSpec, path) if self._kind == "cluster" else load_model(path)
        except ConfigError as error:
            self._problems.append(str(error))
            return None

    def cluster(self, name: str) -> tuple[Path, ClusterSpec]:
        path, found = self._of(name)
        assert isinstance(found, ClusterSpec), "loaded as one"
        return path, found

    def model(self, name: str) -> tuple[Path, ModelSpec]:
        path, found = self._of(name)
        assert isinstance(found, ModelSpec), "loaded as one"
        return path, found

    def _of(self, name: str) -> tuple[Path, ClusterSpec | ModelSpec]:
        found = self._loaded[name]
        assert found is not None, "read_sweep has told what is missing"
        return found


def _of_grid(
    grid: SweepGrid, settings: SweepSettings, clusters: _Files, models: _Files, folder: Path
) -> Iterator[Combination]:
    profiles = tuple(folder / Path(each).expanduser() for each in settings.profiles)
    lists = (grid.clusters, grid.models, grid.global_batch_sizes, grid.precisions, grid.objectives)
    for cluster_name, model_name, batch, precision, objective in itertools.product(*lists):
        cluster_file, cluster = clusters.cluster(cluster_name)
        model_file, model = models.model(model_name)
        yield Combination(
            cluster_name=_short(cluster_name),
            model_name=_short(model_name),
            cluster_file=cluster_file,
            model_file=model_file,
            cluster=cluster,
            model=model,
            global_batch_size=batch,
            seq_length=model.max_position_embeddings if grid.seq_length is None else grid.seq_length,
            precision=precision,
            objective=objective,
            settings=settings,
            profiles=profiles,
        )


def _short(name: str) -> str:
    return name if is_name(name) else Path(name).stem


def _problems_of(combinations: Sequence[Combination]) -> list[str]:
    """What is wrong with single combinations, each problem once with the first combination that has it."""
    found: list[str] = []
    seen: dict[SweepPlace, Combination] = {}
    refused: dict[str, list[SweepPlace]] = {}
    for each in combinations:
        if (other := seen.setdefault(each.place, each)) is not each:
            found.append(
                f"two grids ask for {each.place}; take it out of one of them"
                if other.key == each.key
                else f"two different files make up {each.place}; rename one of them"
            )
            continue
        try:
            each.problem()
        except ConfigError as error:
            refused.setdefault(str(error), []).append(each.place)
    for said, (first, *others) in refused.items():
        found.append(f"{first}{f' and {len(others)} more' if others else ''}: {said}")
    return found
