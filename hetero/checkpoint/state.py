"""Holds the scalars that a run has to know to continue, beside its tensors."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, JsonValue

from hetero.plan.batch_sizes import VaryingBatch, by_flag
from hetero.plan.ir import Plan, Precision
from hetero.printable_fields import ANY_TEXT, AnyText
from hetero.serialization import STRICT
from hetero.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalerState:
    """fp16's dynamic loss scale: its value, good steps since it last moved, bad ones it still forgives."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    scale: float
    growth_tracker: int
    hysteresis: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataState:
    """Which samples a run reads, and in which order.

    paths: prefixes of token files, with weights if there are any, as the flags give them; none if tokens are made up.
    split: shares of training, validation and test; empty where each has files of its own.
    content: digest of the token files, wherever they lie.
    order: digest of the order in which samples are drawn from them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    paths: tuple[AnyText, ...] = ()
    split: str = ""
    content: str = ""
    order: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What else decides how a run goes on, to say so when it goes on with something else.

    data: by ``train``, ``valid`` and ``test``, those that the run has.
    updates: values of the flags that decide the updates of the weights, by flag; without those that are not set.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    data: dict[str, DataState] = field(default_factory=dict)
    updates: dict[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The scalars of a checkpoint. Equal on all ranks.

    step: training steps done, skipped ones included; names the checkpoint.
    plan: what ran when it was saved; ``None`` if a converter wrote it. Another plan may load it.
    consumed_samples: position in the data; the global batch has one order under every plan.
    train_samples: of the whole run as it was laid out, on which the order of the data depends.
    adam_step: updates that were applied, which bias correction counts.
    scheduled_samples: those of these updates, which the learning-rate schedule counts; ``None`` in older checkpoints,
        where every update took the batch of the plan.
    rampup: what changed the batch, if it did, of either kind (the name is that of files from before there were two).
    generation_config: how text is generated from the model, as a generation_config.json says it: the ids that begin
        and end a text, and what else is known; ``None`` if nothing is.
    settings: ``None`` in older checkpoints, and if a converter wrote it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[1] = 1
    step: int
    model: ModelSpec
    precision: Precision
    plan: Plan | None = None
    consumed_samples: int = 0
    train_samples: int | None = None
    adam_step: int = 0
    scheduled_samples: int | None = None
    rampup: VaryingBatch | None = None
    seed: int = 0
    loss_scaler: LossScalerState | None = None
    generation_config: Annotated[dict[str, JsonValue], ANY_TEXT] | None = None
    settings: RunSettings | None = None

    def samples_of_run(self) -> dict[str, object]:
        """Return by flag what decides which sample comes when; a run cannot go on with another value."""
        return {
            "--seed": self.seed,
            "--seq-length": None if self.plan is None else self.plan.seq_length,
            **by_flag(self.rampup),
            "--global-batch-size": None if self.plan is None else self.plan.global_batch_size,
        }

    def is_of_same_run(self, other: "CheckpointState") -> bool:
        """Whether both are of one run, at whatever steps."""
        return (
            self.model == other.model
            and self.precision == other.precision
            and self.samples_of_run() == other.samples_of_run()
        )

    def has_same_course(self, other: "CheckpointState") -> bool:
        """Whether both are of one run with the same length, data and updates."""
        mine, theirs = (self.train_samples, self.settings), (other.train_samples, other.settings)
        return self.is_of_same_run(other) and mine == theirs
