"""``--hetero-emulate``: the launch that would train on a cluster, on this machine's processor."""

import dataclasses

import torch.distributed as dist

from hetero.cost.latency import CostModel
from hetero.cost.traits import runtime_traits
from hetero.data import shipped_profiles
from hetero.distributed.agreement import on_all_ranks
from hetero.emulation.setup import Emulation, emulate
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.profile import Profile
from megatron.training.config import EmulationConfig, PretrainConfig
from megatron.training.tokenizer import Tokenizer


def start_emulation(config: PretrainConfig, plan: Plan, tokenizer: Tokenizer) -> Emulation:
    """The small model's plan and the pace of this rank; collective over the world.

    Raises:
        ConfigError: a device has no profile, the ranks sit on several machines, or the small model does not fit the
            plan; on every rank.
    """
    emulation = config.emulation
    assert emulation is not None, "nothing is emulated"
    cluster, costs = on_all_ranks(lambda: (load(ClusterSpec, emulation.cluster), _costs(config, emulation, plan)))
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
    """``config`` for the small model: its data are cut to the shorter sequences."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, seq_length=emulation.plan.seq_length),
        parallel=dataclasses.replace(config.parallel, bucket_size=emulation.bucket_numel),
    )


def emulation_notice(config: EmulationConfig, plan: Plan) -> str:
    """What a reader of the log has to know."""
    return (
        f"EMULATED: times are those of {config.cluster.name}, a second of which takes "
        f"{config.options.time_scale:g} s here; losses are of a small model (hidden size {plan.model.hidden_size}, "
        f"sequence {plan.seq_length}). The first step is not emulated: it tells whether this machine keeps up."
    )


def _costs(config: PretrainConfig, emulation: EmulationConfig, plan: Plan) -> CostModel:
    return CostModel(
        model=plan.model,
        seq_length=plan.seq_length,
        precision=plan.precision,
        profiles=shipped_profiles().plus([load(Profile, path) for path in emulation.profiles]),
        data_sheets=emulation.data_sheets,
        traits=runtime_traits(distributed_optimizer=config.parallel.use_distributed_optimizer),
    )
