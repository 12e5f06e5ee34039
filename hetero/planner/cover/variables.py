"""Decision variables of the master problem, in whole replicas, microbatches and bytes.

A constraint reads ``column.replicas``, never ``x[17]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from hetero.planner.cover.layer_ranges import LayerRange
from hetero.planner.replica.templates import Template


@dataclass(frozen=True)
class Column:
    """A template as the master problem sees it under a limit on the seconds of a step.

    most_replicas: that the cluster has devices for.
    most_microbatches: that one replica finishes within the limit.
    """

    template: Template
    most_replicas: int
    most_microbatches: int

    @property
    def samples(self) -> int:
        """Samples that one replica finishes within the limit."""
        return self.template.samples * self.most_microbatches


class ColumnVars:
    """The variables of one column: how often its template is used.

    replicas: copies of it.
    microbatches: of all copies together.
    used: whether there is one.
    """

    def __init__(self, model: cp_model.CpModel, index: int, column: Column) -> None:
        self.column = column
        self.template = column.template
        self.replicas = model.new_int_var(0, column.most_replicas, f"replicas_{index}")
        most = column.most_replicas * column.most_microbatches
        self.microbatches = model.new_int_var(0, most, f"microbatches_{index}")
        self.used = model.new_bool_var(f"used_{index}")


class LayerRangeVars:
    """The variables of one range of layers: who holds it, and how slow the links are over which its gradients are
    summed.

    present: by node type, whether a node of it holds the range.
    several: by node type, whether two nodes of it do.
    slower: by tier, whether there is a link of this tier or a slower one among them.
    """

    def __init__(
        self,
        model: cp_model.CpModel,
        layer_range: LayerRange,
        node_types: Sequence[int],
        several: Sequence[int],
        num_tiers: int,
    ) -> None:
        where = f"{layer_range.first}_{layer_range.end}"
        self.layer_range = layer_range
        self.present: Mapping[int, cp_model.IntVar] = {
            k: model.new_bool_var(f"present_{where}_{k}") for k in node_types
        }
        self.several: Mapping[int, cp_model.IntVar] = {k: model.new_bool_var(f"several_{where}_{k}") for k in several}
        self.slower = [model.new_bool_var(f"slower_{where}_{tier}") for tier in range(num_tiers)]


@dataclass(frozen=True)
class MasterVars:
    """All decision variables of a master problem."""

    columns: tuple[ColumnVars, ...]
    layer_ranges: tuple[LayerRangeVars, ...]
