"""Says in blocks what of a stage is kept on its device, and changes that by a block."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from hetero.cost.offload.blocks import OffloadChoice
from hetero.plan.ir import Stage
from hetero.plan.offload import Offload, block_positions, blocks_with_activations_on_host


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResidency:
    """A stage of ``num_layers`` layers and ``num_blocks`` blocks, with embedding and head those it has.

    again: the first so many layers are computed again.
    kept: the optimizer's state of the first so many blocks is on the device, and the host has the others'.
    activations: those of the first so many blocks are on the host between forward and backward.
    """

    positions: tuple[float, ...]
    num_layers: int
    again: int
    kept: int
    activations: int
    offload: Offload

    @classmethod
    def of(cls, stage: Stage, *, num_layers: int) -> Self:
        """What it is in a plan of a model of ``num_layers``.

        The stage computes no layer again selectively.
        """
        positions = tuple(block_positions(stage, num_layers=num_layers))
        layers = len(stage.layer_numbers)
        first = stage.offload.optimizer_from
        return cls(
            positions=positions,
            num_layers=layers,
            again=(stage.recompute_num_layers or layers) if stage.recompute == "full" else 0,
            kept=len(positions) if first is None else sum(position < first for position in positions),
            activations=len(blocks_with_activations_on_host(stage, num_layers=num_layers)),
            offload=stage.offload,
        )

    @classmethod
    def chosen(cls, choice: OffloadChoice, stage: Stage, *, num_layers: int) -> Self:
        """What CP-SAT has chosen for a stage, by position."""
        now = cls.of(dataclasses.replace(stage, recompute="none", recompute_num_layers=None), num_layers=num_layers)
        blocks = choice.blocks
        return dataclasses.replace(
            now,
            again=sum(block.recompute for block in blocks),
            kept=next((i for i, block in enumerate(blocks) if block.optimizer), len(blocks)),
            activations=max((i + 1 for i, block in enumerate(blocks) if block.activations), default=0),
            offload=dataclasses.replace(stage.offload, speculate=choice.speculate),
        )

    def changed(self, *, again: int = 0, kept: int = 0, activations: int = 0) -> Self:
        """The same with so many blocks more of each."""
        return dataclasses.replace(
            self, again=self.again + again, kept=self.kept + kept, activations=self.activations + activations
        )

    @property
    def is_possible(self) -> bool:
        """Whether there are so many layers and blocks."""
        return (
            0 <= self.again <= self.num_layers
            and 0 <= self.kept <= len(self.positions)
            and 0 <= self.activations <= len(self.positions)
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the stage that say so."""
        updates = self.kept < len(self.positions)
        return {
            "recompute": "full" if self.again else "none",
            "recompute_num_layers": self.again if 0 < self.again < self.num_layers else None,
            "offload": dataclasses.replace(
                self.offload,
                optimizer_from=self.positions[self.kept] if updates else None,
                speculate=self.offload.speculate and updates,
                overlap=self.offload.overlap or not updates,
                activations_until=self.positions[self.activations - 1] if self.activations else None,
            ),
        }
