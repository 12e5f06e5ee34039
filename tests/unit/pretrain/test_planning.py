"""What a launch that plans by itself says beside its plan."""

from hetero.cost.wanted_profile import WantedProfile
from megatron.pretrain.planning import _launch_again


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
