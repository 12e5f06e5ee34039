"""When CUDA loads its kernels is decided before anybody calls it."""

import pytest

import pretrain_gpt


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        ("--num-experts 8", {}, "EAGER"),
        ("--num-experts=8 --lr 1", {}, "EAGER"),
        ("--num-experts 8", {"CUDA_MODULE_LOADING": "LAZY"}, "LAZY"),
        ("--num-layers 8", {}, None),
    ],
)
def test_all_kernels_are_loaded_at_start_for_experts_alone(
    words: str, given: dict[str, str], expected: str | None
) -> None:
    environment = dict(given)
    pretrain_gpt.load_kernels_at_start(words.split(), environment)
    assert environment.get("CUDA_MODULE_LOADING") == expected
