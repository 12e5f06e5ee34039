"""Reads a sweep file: grids of clusters, models, batch sizes, precisions and objectives, and how they are planned.

    title: Two clusters
    settings: {time_limit_s: 5}
    grids:
      - clusters: [sailor_a100_v100_16, ./mine.yaml]
        models: [opt-350m]
        global_batch_sizes: [128, 256]
        precisions: [fp32]
        objectives: [time, money]

Every grid stands for all combinations of its lists. A cluster or a model is the name of what ships, or the path of a
file, from the folder of the sweep file.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from hetero.emulation.options import EmulationOptions
from hetero.errors import ConfigError
from hetero.plan.ir import Precision
from hetero.planner.problem import Goal
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT

MOST_COMBINATIONS = 10_000
"""A list too many in a grid is a mistake long before this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepGrid:
    """All combinations of a few lists.

    seq_length: tokens of a sample; ``None`` for the model's most.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    clusters: tuple[str, ...]
    models: tuple[str, ...]
    global_batch_sizes: tuple[int, ...]
    precisions: tuple[Precision, ...] = ("fp32",)
    objectives: tuple[Goal, ...] = ("time",)
    seq_length: int | None = None

    def __post_init__(self) -> None:
        problems = []
        for name in ("clusters", "models", "global_batch_sizes", "precisions", "objectives"):
            values = getattr(self, name)
            if not values:
                problems.append(f"{name} is empty, it must list at least one")
            if repeated := [each for i, each in enumerate(values) if each in values[:i]]:
                problems.append(f"{name} lists {repeated[0]!r} more than once; once is enough")
        if wrong := [each for each in self.global_batch_sizes if each < 1]:
            problems.append(f"global_batch_sizes lists {wrong[0]}, all must be at least 1")
        if self.seq_length is not None and self.seq_length < 1:
            problems.append(f"seq_length is {self.seq_length}, must be at least 1")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def num_combinations(self) -> int:
        lists = (self.clusters, self.models, self.global_batch_sizes, self.precisions, self.objectives)
        return math.prod(map(len, lists))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """How every combination is planned.

    time_limit_s: seconds of each search; ``uniform_limit_s`` of the search for the uniform plan beside it, for all
        GPUs and for those of each node type.
    profiles: files beside the profiles that ship, from the folder of the sweep file.
    data_sheets: price devices without any profile by their data sheets.
    distributed_optimizer, fp8: as the flags of ``hetero plan``.
    seed: of the solver.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    time_limit_s: float = 10.0
    uniform_limit_s: float = 5.0
    profiles: tuple[str, ...] = ()
    data_sheets: bool = False
    distributed_optimizer: bool = False
    fp8: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"time_limit_s": self.time_limit_s, "uniform_limit_s": self.uniform_limit_s}
        if wrong := [f"{name} is {value:g}, must be above 0" for name, value in limits.items() if value <= 0]:
            raise ConfigError("; ".join(wrong))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepEmulation:
    """How plans are emulated.

    steps: emulated steps of each plan.
    most_ranks: a plan of more ranks, which are processes here, is not emulated.
    time_scale, seq_length: as :class:`hetero.emulation.options.EmulationOptions` has them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: int = 2
    most_ranks: int = 16
    time_scale: float | None = None
    seq_length: int = EmulationOptions().seq_length

    def __post_init__(self) -> None:
        for name in ("steps", "most_ranks", "seq_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.time_scale is not None and self.time_scale <= 0:
            raise ConfigError(f"time_scale is {self.time_scale:g}, must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepLaunch:
    """How plans become batch scripts of Slurm.

    flags: of the program, those that a plan does not imply, as on a command line.
    sbatch_options: as the flag of ``hetero launch``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    flags: AnyText
    program: AnyText | None = None
    sbatch_options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """A sweep file.

    launch: needed where batch scripts are asked for.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    grids: tuple[SweepGrid, ...]
    title: str | None = None
    settings: SweepSettings = SweepSettings()
    emulation: SweepEmulation = SweepEmulation()
    launch: SweepLaunch | None = None

    def __post_init__(self) -> None:
        if not self.grids:
            raise ConfigError("grids is empty, it must list at least one")
        number = sum(grid.num_combinations for grid in self.grids)
        if number > MOST_COMBINATIONS:
            raise ConfigError(f"the grids have {number:,} combinations, at most {MOST_COMBINATIONS:,} are swept")
