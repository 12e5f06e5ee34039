"""What a launch that plans by itself says beside its plan."""

import pytest

from hetero.cost.wanted_profile import WantedProfile
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.planning import _launch_again, launched_runtime
from tests.helpers.commands import command_line


@pytest.mark.parametrize(
    ("flags", "sums"), [({}, "fused"), ({"no_gradient_accumulation_fusion": ""}, "separate")], ids=["default", "off"]
)
def test_plans_are_priced_with_who_adds_weight_gradients_in_this_launch(flags: dict[str, str], sums: str) -> None:
    implementation = launched_runtime(parse_args(command_line(micro_batch_size="1", **flags))).model().implementation
    assert implementation is not None
    assert implementation.gradient_sums == sums


def test_what_measures_and_what_launches_again_are_lines_to_type() -> None:
    wanted = WantedProfile(
        device="H800",
        seq_length=4096,
        precision="bf16",
        layers="transformer_engine",
        tps=(1, 2),
        micro_batch_sizes=(1,),
        hidden_dropout=0.0,
        attention_dropout=0.1,
    )
    assert _launch_again(wanted) == (
        "hetero profile run --model MODEL.yaml --seq-length 4096 --precision bf16 --device-type H800 --tp 1 2 "
        "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0.1 --out profiles    # on one H800",
        "the same launch with --hetero-profile profiles/model.h800.bf16.transformer_engine.json",
    )
