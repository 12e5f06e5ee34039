"""Holds the configuration of a run, and with it the table of all flags."""

from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from megatron.pretrain.cli import derived
from megatron.pretrain.cli.fields import Flag, computed, config_dataclass, flag_reader, part
from megatron.pretrain.cli.logging_config import LoggingConfig, ProfilerConfig, ScalarsConfig
from megatron.pretrain.cli.model_config import KERNELS, STAGE_OPTIONS, ModelConfig
from megatron.pretrain.cli.parallel_config import PLAN, PRECISION, EmulationConfig, ParallelConfig
from megatron.pretrain.cli.training_config import (
    LOSS_SCALE_OPTIONS,
    OPTIMIZER,
    REGULARIZATION,
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
)

MODEL, DATA, LEARNING_RATE = "model", "data", "learning rate"
PARALLELISM, CHECKPOINTS, RUN, LOGGING, PROFILER = "parallelism", "checkpoints", "run", "logging", "profiler"

GROUPS = (
    MODEL,
    KERNELS,
    REGULARIZATION,
    DATA,
    OPTIMIZER,
    LEARNING_RATE,
    PLAN,
    PARALLELISM,
    PRECISION,
    CHECKPOINTS,
    RUN,
    LOGGING,
    PROFILER,
)
"""Groups of ``--help`` in its order. What stands behind a colon orders the flags below one title."""


@config_dataclass
class PretrainConfig:
    """Holds everything that a run is told, a part for each who is concerned.

    Names and defaults are Megatron-LM's where it has them.
    emulation: ``None`` where the devices are what they are.
    notes: the flags that were given and have no effect, each with the reason.
    """

    model: ModelConfig = part(MODEL)
    stage: StageOptions = part(MODEL, STAGE_OPTIONS)
    data: DataConfig = part(DATA)
    parallel: ParallelConfig = part(PARALLELISM)
    optimizer: OptimizerConfig = part(LEARNING_RATE)
    loss_scale: LossScaleOptions = part(PRECISION, LOSS_SCALE_OPTIONS)
    checkpoint: CheckpointConfig = part(CHECKPOINTS)
    run: RunConfig = part(RUN)
    logging: LoggingConfig = part(LOGGING)
    scalars: ScalarsConfig = part(LOGGING)
    profiler: ProfilerConfig = part(PROFILER)
    emulation: EmulationConfig | None = part(PLAN, when=derived.emulates)
    notes: tuple[tuple[str, str], ...] = computed(lambda flags: tuple(flags.notes.items()))


PRETRAIN = flag_reader(PretrainConfig)
"""All flags, and how a configuration is made of their values."""

FLAGS: tuple[Flag, ...] = PRETRAIN.flags
