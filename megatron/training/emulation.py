"""``--hetero-emulate``: the launch that would train on a cluster, on this machine's processor."""

import dataclasses

import torch.distributed as dist

from hetero.cost.cost_model import CostModel
from hetero.data import shipped_profiles
from hetero.distributed.rank_consensus import on_all_ranks
from hetero.emulation.setup import Emulation, emulate
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.profile import Profile
from megatron.training.config import EmulationConfig, PretrainConfig
from megatron.training.planning import runtime_runtime
from megatron.training.tokenizer import Tokenizer

CHECKPOINTS = "emulated"
"""Folder of the small model's checkpoints, in that of the real ones."""


def start_emulation(config: PretrainConfig, plan: Plan, tokenizer: Tokenizer) -> Emulation:
    """The small model's plan and the timing of this rank; collective over the world.

    Raises:
        ConfigError: a device has no profile, the ranks sit on several machines, or the small model does not fit the
            plan; on every rank.
    """
    emulation = config.emulation
    assert emulation is not None, "nothing is emulated"
    cluster, costs = on_all_ranks(lambda: (load(ClusterSpec, emulation.cluster), emulated_costs(config, plan)))
    return emulate(
        plan,
        cluster,
        costs,
        options=emulation.options,
        vocab_size=tokenizer.vocab_size,
        bucket_numel=config.parallel.bucket_size,
        rank=dist.get_rank(),
    )


def emulated_config(config: PretrainConfig, emulation: Emulation) -> PretrainConfig:
    """``config`` for the small model: its data are cut to the shorter sequences, and its checkpoints are kept apart."""
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
    """What a reader of the log has to know."""
    return (
        f"EMULATED: times are those of {config.cluster.name}, a second of which takes "
        f"{config.options.time_scale:g} s here; losses are of a small model (hidden size {plan.model.hidden_size}, "
        f"sequence {plan.seq_length}), whose checkpoints go to a folder {CHECKPOINTS!r}. The first step is not "
        "emulated: it tells whether this machine keeps up."
    )


def emulated_costs(config: PretrainConfig, plan: Plan) -> CostModel:
    """What the described devices take.

    Raises:
        ConfigError: a profile is missing or malformed.
    """
    emulation = config.emulation
    assert emulation is not None, "nothing is emulated"
    return CostModel(
        model=plan.model,
        seq_length=plan.seq_length,
        precision=plan.precision,
        profiles=shipped_profiles().plus([load(Profile, path) for path in emulation.profiles]),
        data_sheets=emulation.data_sheets,
        runtime=runtime_runtime(config),
    )
