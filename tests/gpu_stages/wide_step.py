"""Measures the step of a model of real width on one rank, and predicts it by data sheet and by profile.

    python -m tests.gpu_stages.wide_step {local,engine} --device-name 'NVIDIA H200' --out runs/gpu

The model is the first 8 layers of Llama 3 8B, with its embedding and head. The stage ``profile`` leaves profiles in the
folder.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import plan_costs
from hetero.errors import HeteroError
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.model import ModelSpec
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.model_config import model_spec
from tests.gpu_stages.target import Target, add_target_options, target_of
from tests.gpu_stages.trainings import Experiment, Training, TrainingRun, check_finished, model_flags, run_experiment

NUM_MICROBATCHES = 8
BATCH = ("--micro-batch-size", "1", "--global-batch-size", str(NUM_MICROBATCHES))

PROFILES = "profiles"
"""Folder of profiles in that of the run."""


def wide_flags(target: Target) -> tuple[str, ...]:
    """Return the flags of the model; a rehearsal on a CPU has a narrow one."""
    if target.device == "cuda":
        return model_flags(layers=8, hidden=4096, ffn=14336, heads=32, groups=8, seq=4096, vocab=128_256)
    return model_flags(layers=2, hidden=64, ffn=128, heads=4, groups=2, seq=16, vocab=256)


def wide_model(target: Target) -> ModelSpec:
    """Return the model that :func:`wide_flags` describe."""
    return model_spec(parse_args([*wide_flags(target), *BATCH]).model, tokenizer_vocab_size=1)


def wide_plan(target: Target) -> Plan | None:
    """Return the plan of the step, None where the catalogue does not know the device."""
    device = SHIPPED_DEVICES.called(target.name) if target.device == "cuda" else SHIPPED_DEVICES.of("cpu")
    if device is None:
        return None
    model = wide_model(target)
    assert model.max_position_embeddings is not None
    return uniform_plan(
        UniformLayout(
            model=model,
            world_size=1,
            micro_batch_size=1,
            global_batch_size=NUM_MICROBATCHES,
            seq_length=model.max_position_embeddings,
            device=device.name,
            precision=target.half,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )


def predicted_s(plan: Plan, profiles: Sequence[Path]) -> float:
    """Return the seconds of a step as they are predicted by ``profiles``, or by data sheet where there are none."""
    device = plan.replicas[0].stages[0].device
    cluster = ClusterSpec(node_types=(NodeType(name="here", device=device, gpus_per_node=1),))
    return simulate(plan, cluster, plan_costs(plan, cluster, profiles=profiles, data_sheets=True)).step_s


def print_predictions(target: Target, out: Path) -> None:
    """Print what the cost model says of the step."""
    plan = wide_plan(target)
    if plan is None:
        print(f"\nnot predicted: no device type is called {target.name}")
        return
    measured = sorted((out / PROFILES).glob("*.json"))
    for source, profiles in (("data sheet", []), ("profile", measured)):
        if source == "profile" and not profiles:
            print("predicted by profile: the stage profile has left none")
            continue
        try:
            print(f"predicted by {source}: {predicted_s(plan, profiles):.4f} s")
        except HeteroError as error:
            print(f"predicted by {source}: {error}")


def check_wide(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """Yield what is wrong with the only training of ``runs``."""
    (run,) = runs
    yield from check_finished(run)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print step time and predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", choices=("local", "engine"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    add_target_options(parser)
    arguments = parser.parse_args(argv)
    target = target_of(arguments)
    layers = ("--transformer-impl", "transformer_engine" if arguments.layers == "engine" else "local")
    training = Training(name=arguments.layers, flags=(*wide_flags(target), *BATCH, f"--{target.half}", *layers))
    code = run_experiment(Experiment(trainings=(training,), check=check_wide))
    print_predictions(target, arguments.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
