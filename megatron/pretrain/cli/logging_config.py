"""Declares the flags of what is told of a run: log lines, TensorBoard, Weights & Biases, Prometheus, and profilers."""

from operator import itemgetter
from pathlib import Path

from megatron.pretrain.cli.fields import (
    Condition,
    FlagValues,
    Relations,
    computed,
    config_dataclass,
    flag,
    given,
    off_switch,
    switch,
)
from megatron.pretrain.cli.value_types import ADDRESS, COUNT, COUNT_FROM_0, FROM_1, NAME, PATH, PORT, RANKS, or_empty

# Published scripts carry the details of what they do not switch on.
_NO_TENSORBOARD, _NO_WANDB = "no files of TensorBoard are written", "nothing goes to Weights & Biases"
_NO_PROFILE = "nothing is profiled without --profile"
_OF_TENSORBOARD = Relations(needs=(given("--tensorboard-dir", _NO_TENSORBOARD),))
_OF_WANDB = Relations(needs=(given("--wandb-project", _NO_WANDB),))
_OF_PORT = Relations(needs=(given("--hetero-metrics-port"),))


def _writes(flags: FlagValues) -> bool:
    return any(bool(flags[name]) for name in ("--tensorboard-dir", "--wandb-project", "--hetero-metrics-port"))


_OF_WRITERS = Relations(
    needs=(
        Condition(
            _writes,
            "--tensorboard-dir, --wandb-project or --hetero-metrics-port",
            note="nothing is written for TensorBoard or its likes",
        ),
    )
)
_PROFILES = given("--profile", _NO_PROFILE)
_OF_PROFILE = Relations(needs=(_PROFILES,))
_OF_TORCH_PROFILER = Relations(needs=(_PROFILES, given("--use-pytorch-profiler", "torch's profiler is not used")))
_OF_STAGE_TIMES = Relations(needs=(given("--hetero-stage-times-interval"),))
_NO_RATE = ("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard")
_NO_SCALE = ("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard")


@config_dataclass
class ScalarsConfig:
    """Says where figures are written and which. Each writer gets the same ones.

    interval: steps from one write to the next; losses and times are means over them.
    queue_size: entries that TensorBoard's writer keeps before it writes them into its file.
    wandb_save_dir: where Weights & Biases keeps its files, ``None`` for its own choice.
    port: where Prometheus may ask for the newest figures, ``None`` for nowhere.
    host: address of the interface on which it may.
    """

    tensorboard_dir: Path | None = flag("Folder for TensorBoard's files; without it none are written.", default=None)
    wandb_project: str | None = flag(
        "Project of Weights & Biases that gets the same as TensorBoard; with WANDB_MODE=offline in files alone.",
        or_empty(NAME),
        default=None,
    )
    wandb_entity: str | None = flag(
        "With --wandb-project: whose it is, a user or a team.", or_empty(NAME), default=None, relations=_OF_WANDB
    )
    wandb_exp_name: str | None = flag(
        "With --wandb-project: name of this run.", or_empty(NAME), default=None, relations=_OF_WANDB
    )
    wandb_save_dir: Path | None = flag(
        "With --wandb-project: folder for its files.", or_empty(PATH), default=None, relations=_OF_WANDB
    )
    port: int | None = flag(
        "Port on which Prometheus may ask for the newest of these figures, of the host of rank 0.",
        PORT,
        name="--hetero-metrics-port",
        default=None,
    )
    host: str = flag(
        "With --hetero-metrics-port: address of the interface; 0.0.0.0 for all. Whoever reaches it can read.",
        ADDRESS,
        name="--hetero-metrics-host",
        default="127.0.0.1",
        relations=_OF_PORT,
    )
    interval: int = flag(
        "Steps from one write for TensorBoard and its likes to the next.",
        COUNT,
        name="--tensorboard-log-interval",
        default=1,
        relations=_OF_WRITERS,
    )
    queue_size: int = flag(
        "With --tensorboard-dir: entries that may wait to be written into its file.",
        COUNT,
        name="--tensorboard-queue-size",
        default=1000,
        relations=_OF_TENSORBOARD,
    )
    timers: bool = flag(
        "Write the seconds in steps, evaluations and saves so far for TensorBoard and its likes.",
        name="--log-timers-to-tensorboard",
        default=False,
        relations=_OF_WRITERS,
    )
    validation_ppl: bool = flag(
        "Write the perplexity of evaluations, too.",
        name="--log-validation-ppl-to-tensorboard",
        default=False,
        relations=_OF_WRITERS,
    )
    world_size: bool = flag(
        "Write the number of ranks, too.",
        name="--log-world-size-to-tensorboard",
        default=False,
        relations=_OF_WRITERS,
    )
    batch_size: bool = flag(
        "Write the global batch size, too.",
        name="--log-batch-size-to-tensorboard",
        default=False,
        relations=_OF_WRITERS,
    )
    learning_rate: bool = computed(
        lambda flags: not any(flags[name] for name in _NO_RATE),
        switch(_NO_RATE[0], "Do not write the learning rate.", relations=_OF_WRITERS),
        switch(_NO_RATE[1], "The same, as Megatron-LM has long spelled it.", relations=_OF_WRITERS),
    )
    loss_scale: bool = computed(
        lambda flags: not any(flags[name] for name in _NO_SCALE),
        switch(_NO_SCALE[0], "Do not write the loss scale of --fp16.", relations=_OF_WRITERS),
        switch(_NO_SCALE[1], "The same.", relations=_OF_WRITERS),
    )
    memory: bool = flag(
        "Write the memory of devices and hosts, too, at every log line unless --log-memory-interval says when.",
        name="--log-memory-to-tensorboard",
        default=False,
        relations=_OF_WRITERS,
    )

    @property
    def is_wanted(self) -> bool:
        """Somebody gets figures."""
        return self.tensorboard_dir is not None or self.wandb_project is not None or self.port is not None


@config_dataclass
class ProfilerConfig:
    """Says which steps of which ranks a profiler looks at, on a run with ``--profile``.

    start_step, end_step: the steps behind ``start_step`` up to ``end_step``, which counts from 1.
    torch: torch's profiler writes traces, else nsys is told when to begin and to end.
    nvtx_ranges: parts of layers are marked for nsys.
    """

    enabled: bool = flag(
        "Profile some steps: with --use-pytorch-profiler into --tensorboard-dir, else by nsys, under which the run is "
        "started (nsys profile --capture-range=cudaProfilerApi).",
        name="--profile",
        default=False,
    )
    start_step: int = flag(
        "With --profile: the steps after this one.",
        COUNT_FROM_0,
        name="--profile-step-start",
        default=10,
        relations=_OF_PROFILE,
    )
    end_step: int = flag(
        "With --profile: the last step.", COUNT, name="--profile-step-end", default=12, relations=_OF_PROFILE
    )
    ranks: tuple[int, ...] = flag(
        "With --profile: the ranks.", RANKS, name="--profile-ranks", default=(0,), relations=_OF_PROFILE
    )
    torch: bool = flag(
        "With --profile: by torch's profiler, a trace per rank, which TensorBoard and Perfetto show.",
        name="--use-pytorch-profiler",
        default=False,
        relations=Relations(needs=(_PROFILES, given("--tensorboard-dir"))),
    )
    nvtx_ranges: bool = flag(
        "With --profile and nsys: mark the parts of layers by NVTX ranges, as megatron-core names them.",
        default=False,
        relations=Relations(
            needs=(
                _PROFILES,
                Condition(
                    lambda flags: not flags["--use-pytorch-profiler"],
                    "nsys, so without --use-pytorch-profiler",
                    note="torch's profiler records no NVTX ranges",
                ),
            )
        ),
    )
    shapes: bool = flag(
        "With --use-pytorch-profiler: the shapes of tensors.",
        name="--pytorch-profiler-collect-shapes",
        default=False,
        relations=_OF_TORCH_PROFILER,
    )
    callstack: bool = flag(
        "With --use-pytorch-profiler: the lines of Python.",
        name="--pytorch-profiler-collect-callstack",
        default=False,
        relations=_OF_TORCH_PROFILER,
    )


@config_dataclass
class LoggingConfig:
    """Says what is told of a run, how often, and where.

    throughput: of each device type, in the log line.
    memory_interval: steps from one look at the memory of all ranks to the next; ``None`` for none in the log.
    stage_times_interval: steps from one measured step to the next; ``None`` measures none.
    slow_stage: how many times as long as predicted a stage may compute before it is named.
    profiles, data_sheets: what the prediction rests on, beside the shipped profiles.
    """

    log_interval: int = flag("Steps from one log line to the next.", COUNT, default=100)
    throughput: bool = flag(
        "Put TFLOP/s and MFU of each device type into the log line.", name="--log-throughput", default=False
    )
    memory_interval: int | None = flag(
        "Steps from one log line on the memory of devices and hosts to the next; without it none.",
        COUNT,
        name="--log-memory-interval",
        default=None,
    )
    stage_times_interval: int | None = flag(
        "Steps from one to the next whose busy, bubble and exposed seconds of every stage are measured and told beside "
        "the predicted ones; without it none.",
        COUNT,
        name="--hetero-stage-times-interval",
        default=None,
        relations=Relations(excludes=("--hetero-emulate",)),
    )
    slow_stage: float = flag(
        "With --hetero-stage-times-interval: name stages that compute so many times as long as predicted.",
        FROM_1,
        name="--hetero-slow-stage",
        default=1.3,
        relations=_OF_STAGE_TIMES,
    )
    profiles: tuple[Path, ...] = computed(itemgetter("--hetero-profile"))
    data_sheets: bool = computed(itemgetter("--hetero-data-sheets"))
    progress: bool = off_switch("--no-progress", "No progress bar.")
