"""Prices every division of a model's layers among the stages of one replica, as matrices over where a stage begins and
ends.

A stage's seconds and bytes are those of :mod:`hetero.cost`, taken apart into what a layer, half of one, the embedding
and the head add. Where its device lacks memory at a depth, so many layers are computed again as that takes, no more.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero.cost.capacity import capacity_bytes
from hetero.cost.cost_model import StageConfig
from hetero.cost.simulation.recent import Recent
from hetero.cost.stage_memory import StageMemory, stage_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Recompute, Replica
from hetero.planner.problem import Problem
from hetero.spec.parameters import HALF
from hetero.spec.profile import ModuleKind

Matrix = NDArray[np.float64]

MOST_HALVED = 64
"""Models of more layers are divided in whole ones: the matrices grow with the square. A heuristic."""

MOST_LAYERS = 256
"""Models of more layers are not divided here at all. A heuristic."""

MOST_TABLES = 2048
"""Tables that are kept, of kinds of stages and their depths. A heuristic."""


class StageKind(NamedTuple):
    """What decides seconds and bytes of a stage beside its layers.

    samples: per microbatch on a data-parallel rank.
    ways: among so many ranks the optimizer's state is shared.
    """

    device: str
    tp: int
    samples: int
    sequence_parallel: bool
    fp8: bool
    wgrad_delay: int | None
    capacity_bytes: int
    neighbours: int
    shares_gradients: bool
    ways: int


class StageTable(NamedTuple):
    """Of a stage from position i to position k, at one depth: ``[i, k]`` of three matrices.

    seconds: of a forward and a backward of a microbatch; infinite where nothing is held, or does not fit.
    weight_s: the part of them that a split backward leaves for later; 0 where the backward is whole.
    recomputed: layers whose forward is computed again for the memory that this saves.
    """

    seconds: Matrix
    weight_s: Matrix
    recomputed: NDArray[np.int64]


class _Bytes(NamedTuple):
    """Bytes of one device of a stage.

    fixed: what stays through the step, such as weights, gradients and optimizer state.
    working: what a layer works with while it computes.
    kept: of a microbatch between its forward and its backward.
    deferred: of a microbatch that waits for its weights' gradients.
    slack: share that the allocator reserves beyond what comes and goes.
    """

    fixed: float
    working: float
    kept: float
    deferred: float
    slack: float

    @classmethod
    def of(cls, memory: StageMemory) -> "_Bytes":
        return cls(
            memory.fixed.total - memory.fixed.working,
            memory.fixed.working,
            memory.activations_per_microbatch + memory.logits_per_microbatch,
            memory.deferred_per_microbatch,
            memory.allocator_slack,
        )


class DivisionCosts:
    """The tables of all stages of plans for ``problem``; they are remembered."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._tables: Recent[StageTable] = Recent(MOST_TABLES)
        self._seconds: Recent[tuple[Matrix, float]] = Recent(MOST_TABLES)
        self._weights: Recent[Matrix] = Recent(MOST_TABLES)
        self._bytes: Recent[tuple[dict[str, Matrix], _Bytes, _Bytes]] = Recent(MOST_TABLES)

    @property
    def can_divide(self) -> bool:
        """The model has layers between its ends, and not too many."""
        return 4 <= self._problem.model.num_layers <= MOST_LAYERS

    @cached_property
    def positions(self) -> NDArray[np.float64]:
        """Where stages may begin and end, in layers."""
        num_layers = self._problem.model.num_layers
        return np.linspace(0.0, num_layers, num_layers * (2 if num_layers <= MOST_HALVED else 1) + 1)

    def kind(self, replica: Replica, s: int, ways: int) -> StageKind:
        """The kind of a stage. ``ways``: ranks that hold the same layers, over all replicas."""
        stage = replica.stages[s]
        capacity = capacity_bytes(stage, self._problem.cluster)
        assert capacity is not None, "a problem knows the memory of all of its devices"
        return StageKind(
            stage.device,
            stage.tp,
            stage.micro_batch_size,
            stage.splits_sequence,
            stage.fp8,
            stage.wgrad_delay,
            capacity,
            (s > 0) + (s + 1 < len(replica.stages)),
            ways > 1,
            ways if self._problem.distributed_optimizer else 1,
        )

    def table(self, kind: StageKind, depth: int) -> StageTable:
        """Seconds and recomputation of a stage of this kind with so many microbatches in flight.

        Raises:
            ConfigError: a device has no profile.
        """
        return self._tables.of((kind, depth), lambda: self._table(kind, depth))

    def can_split(self, kind: StageKind) -> bool:
        """Whether the profiles of its device tell what of a backward could wait."""
        try:
            self._weights.of(kind[:5], lambda: self._weight_seconds_of(kind))
        except ConfigError:
            return False
        return True

    def _table(self, kind: StageKind, depth: int) -> StageTable:
        seconds, again_s = self._seconds.of(kind[:5], lambda: self._seconds_of(kind))
        of_stage, one, recomputing = self._bytes.of(kind, lambda: self._bytes_of(kind))
        waiting = 0.0 if kind.wgrad_delay is None else (kind.wgrad_delay + 1) * of_stage["deferred"]
        # The inputs of layers that are computed again stay.
        saved = max(1.0, depth * (one.kept - recomputing.kept))
        moving = depth * of_stage["kept"] + of_stage["working"]
        room = (kind.capacity_bytes - of_stage["fixed"]) / (1.0 + one.slack)
        # What is computed again has no backward that could be split, so that nothing waits; it works with a layer more.
        short = moving + (recomputing.working - one.working) - room
        # Layers are computed again from the first one on; half a layer counts as one of them, and saves half as much.
        half = (self.positions % 1 > 0)[:, None]
        layers, of_layers = short / saved, self.positions[None, :] - self.positions[:, None]
        num_layers = np.ceil(self.positions)[None, :] - np.floor(self.positions)[:, None]
        stays = moving + waiting <= room
        recomputed = np.where(stays, 0.0, np.maximum(1.0, np.ceil(layers + HALF * half)))
        fits = stays | ((recomputed <= num_layers) & (layers <= of_layers))
        recomputed = np.where(fits, recomputed, 0.0)
        again = np.maximum(0.0, recomputed - HALF * half) * again_s
        weight_s = np.zeros_like(seconds)
        if kind.wgrad_delay is not None:
            weight_s = np.where(recomputed > 0, 0.0, self._weights.of(kind[:5], lambda: self._weight_seconds_of(kind)))
        return StageTable(np.where(fits, seconds + again, np.inf), weight_s, recomputed.astype(np.int64))

    def _between(self, at: Matrix, first: float, last: float) -> Matrix:
        """What lies between two positions, by what lies before each, with what the ends of the model add."""
        found = at[None, :] - at[:, None]
        found[0, :] += first
        found[:, -1] += last
        return found

    def _up_to(self, half: float, whole: float) -> Matrix:
        """What lies before each position, by what the attention of a layer and the whole of it add."""
        return np.floor(self.positions) * whole + (self.positions % 1 > 0) * half

    def _seconds_of(self, kind: StageKind) -> tuple[Matrix, float]:
        costs = self._problem.costs

        def layer_s(module: ModuleKind) -> float:
            cost = costs.layer(
                module,
                device=kind.device,
                tp=kind.tp,
                micro_batch_size=kind.samples,
                sequence_parallel=kind.sequence_parallel,
                fp8=kind.fp8,
            )
            return cost.forward_s + cost.backward_s

        up_to = self._up_to(layer_s("attention"), layer_s("block"))
        seconds = self._between(up_to, layer_s("embedding"), layer_s("head"))
        seconds[self.positions[None, :] <= self.positions[:, None]] = np.inf
        again_s = (
            costs.stage(self._config(kind, 1.0, 2.0, "full")).backward_s
            - costs.stage(self._config(kind, 1.0, 2.0)).backward_s
        )
        return seconds, again_s

    def _weight_seconds_of(self, kind: StageKind) -> Matrix:
        """Of the weights' gradients of a microbatch, where the backward is split."""
        half_s, whole_s = (
            self._problem.costs.stage(self._config(kind, 1.0, end, splits=True)).weight_s for end in (1.5, 2.0)
        )
        return np.maximum(0.0, self._between(self._up_to(half_s, whole_s), 0.0, 0.0))

    def _bytes_of(self, kind: StageKind) -> tuple[dict[str, Matrix], _Bytes, _Bytes]:
        def bytes_of(first: float, end: float, recompute: Recompute = "none") -> _Bytes:
            memory = stage_memory(
                self._problem.costs,
                self._config(kind, first, end, recompute),
                num_neighbours=kind.neighbours,
                shares_gradients=kind.shares_gradients,
                optimizer_ways=kind.ways,
            )
            return _Bytes.of(memory)

        num_layers = float(self._problem.model.num_layers)
        one, half, again = bytes_of(1.0, 2.0), bytes_of(1.0, 1.5), bytes_of(1.0, 2.0, "full")
        first, last = bytes_of(0.0, 1.0), bytes_of(num_layers - 1, num_layers)
        each = bytes_of(1.0, 3.0).fixed - one.fixed
        without = one.fixed - each
        found = {
            "fixed": self._between(
                self._up_to(half.fixed - without, each), first.fixed - one.fixed, last.fixed - one.fixed
            )
            + without,
            "kept": self._between(self._up_to(half.kept, one.kept), first.kept - one.kept, last.kept - one.kept),
            "deferred": self._between(self._up_to(half.deferred, one.deferred), 0.0, 0.0),
            "working": self._between(
                np.zeros_like(self.positions), first.working - one.working, last.working - one.working
            )
            + one.working,
        }
        return found, one, again

    def _config(
        self, kind: StageKind, first: float, end: float, recompute: Recompute = "none", *, splits: bool = False
    ) -> StageConfig:
        return StageConfig(
            kind.device, first, end, kind.tp, kind.samples, kind.sequence_parallel, recompute, None, splits, kind.fp8
        )
