"""Runs ``--hetero-emulate``: a launch for a described cluster, with its times and memory, on this machine's CPU."""

import dataclasses
from collections.abc import Callable

from hetero.cost.cost_model import CostModel
from hetero.data.cost_models import plan_costs
from hetero.distributed.rank_consensus import on_all_ranks
from hetero.emulation.ranks.setup import Emulation, emulate
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.parallel_config import EmulationConfig
from megatron.pretrain.planning import launched_runtime
from megatron.pretrain.tokenizer import Tokenizer

CHECKPOINTS = "emulated"
"""Folder of the small model's checkpoints, in that of the real ones."""


def start_emulation(
    config: PretrainConfig, plan: Plan, tokenizer: Tokenizer, *, present: Callable[[ClusterSpec], ClusterSpec]
) -> Emulation:
    """Make the small model's plan and this rank's emulated timing; collective over the world.

    Args:
        present: takes the cluster of the file, and returns what is there of it, for which ``plan`` is.

    Raises:
        ConfigError: a device has no profile, the ranks sit on several machines, or the small model does not fit the
            plan; on every rank.
    """
    emulation = config.emulation
    assert emulation is not None, "nothing is emulated"
    cluster, costs = on_all_ranks(lambda: (present(load(ClusterSpec, emulation.cluster)), emulated_costs(config, plan)))
    return emulate(
        plan,
        cluster,
        costs,
        options=emulation.options,
        vocab_size=tokenizer.vocab_size,
        bucket_numel=config.parallel.bucket_size,
    )


def emulated_config(config: PretrainConfig, emulation: Emulation) -> PretrainConfig:
    """Change ``config`` for the small model: shorter sequences, and checkpoints in a folder of their own."""
    checkpoint = config.checkpoint
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(
            checkpoint,
            save=None if checkpoint.save is None else checkpoint.save / CHECKPOINTS,
            load=None if checkpoint.load is None else checkpoint.load / CHECKPOINTS,
        ),
        data=dataclasses.replace(config.data, seq_length=emulation.plan.seq_length),
        parallel=dataclasses.replace(config.parallel, bucket_size=emulation.bucket_numel),
    )


def emulation_notice(config: EmulationConfig, plan: Plan) -> str:
    """Say in the log that times are emulated and losses those of a small model."""
    scale = config.options.time_scale
    takes = f"{scale:g} s" if scale is not None else "1 s, or more if that is too fast,"
    return (
        f"EMULATED: times are those of {config.cluster.name}, a second of which takes {takes} here; losses are of a "
        f"small model (hidden size {plan.model.hidden_size}, sequence {plan.seq_length}), whose checkpoints go to a "
        f"folder {CHECKPOINTS!r}. The first step is not emulated: it tells at which pace this machine keeps up."
    )


def emulated_costs(config: PretrainConfig, plan: Plan) -> CostModel:
    """Price the work on the described devices.

    Raises:
        ConfigError: a profile is missing or malformed.
    """
    emulation = config.emulation
    assert emulation is not None, "nothing is emulated"
    return plan_costs(
        plan,
        profiles=emulation.profiles,
        data_sheets=emulation.data_sheets,
        runtime=launched_runtime(config).model(),
    )
