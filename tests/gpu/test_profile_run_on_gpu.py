"""``hetero profile run`` measures a block by CUDA's events and its memory by the allocator's count."""

import time

import pytest
import torch

from hetero.profiling.built_parts import BuiltParts, LayersOfModel
from hetero.profiling.compiled_shapes import compile_for_each_shape
from hetero.profiling.laps import time_parts
from hetero.profiling.measure_point import Share, measure_point
from hetero.profiling.points import ProfilePoint
from hetero.profiling.profiled_plan import STAGE_OF, ProfiledModel
from hetero.profiling.stage_part import world_of_rank_0
from hetero.runtime import stage
from hetero.runtime.options import StageOptions
from hetero.spec.profile import LayerTime, ModuleKind, RecomputedTime, SplitBackwardTime, UpdateTime
from tests.helpers.gpu_ranks import GPU, device_type_here
from tests.helpers.models import gpt2_model

MODEL = gpt2_model(
    num_layers=2, hidden_size=1024, num_attention_heads=16, num_query_groups=16, kv_channels=64, ffn_hidden_size=4096
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_events_measure_the_device_and_not_the_host() -> None:
    """The host is back from a launch long before the device: no GPU does the 1.1e12 operations in under 0.4 ms."""
    device = torch.device("cuda", 0)
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.float16)

    def multiply() -> None:
        torch.mm(matrix, matrix)

    found = time_parts([multiply, lambda: None], device=device, seconds=0.2, longest_s=60)
    assert found is not None
    product, nothing = found
    assert nothing.median_s < product.median_s / 4
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    assert product.median_s == pytest.approx((time.perf_counter() - start) / 10, rel=0.5)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "bf16"), pytest.param("cuda", "fp32", marks=GPU), pytest.param("cuda", "bf16", marks=GPU)],
)
def test_every_sort_of_point_is_measured(device: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU a smaller one, so that what runs on a GPU is the same code. No weight is drawn as in a training."""
    monkeypatch.delattr(stage, "draw_weights")
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    model = MODEL if device == "cuda" else gpt2_model()
    profiled = ProfiledModel(
        model=model, device=device_type_here(device), seq_length=16, precision="bf16" if precision == "bf16" else "fp32"
    )

    world_size = 2 * len(STAGE_OF)
    with world_of_rank_0(world_size=world_size), compile_for_each_shape():
        parts, layers = BuiltParts(on, world_size=world_size), LayersOfModel(profiled, StageOptions())
        kernels = set()

        def measured(what: str, kind: ModuleKind = "block", *, tp: int = 2, size: int = 2) -> object:
            point = ProfilePoint(what=what, kind=kind, tp=tp, micro_batch_size=size)  # type: ignore[arg-type]
            share = Share(seconds=0.02, longest_s=120.0)
            found = measure_point(point, parts.take(layers, point), device=on, share=share, clock=time.perf_counter)
            assert found is not None
            if kind in ("block", "attention") and what != "update":
                kernels.add(found.attention)
            else:
                assert what == "update" or found.attention is None
            return found.measured

        block, full = measured("passes"), measured("full")
        assert isinstance(block, LayerTime)
        assert isinstance(full, RecomputedTime)
        assert block.saved_bytes is not None
        assert full.saved_bytes is not None
        assert full.saved_bytes < block.saved_bytes / 4
        for kind in ("embedding", "attention", "mlp", "head"):
            assert isinstance(measured("passes", kind), LayerTime)
        split = measured("split")
        assert isinstance(split, SplitBackwardTime)
        assert 0 < split.weights_share < 1
        assert isinstance(measured("update"), UpdateTime)

        # One part of the model runs all sizes, also after others have run, and each size on its own.
        whole, three, again = measured("passes", tp=1), measured("passes", size=3), measured("passes")
        assert isinstance(whole, LayerTime)
        assert isinstance(three, LayerTime)
        assert isinstance(again, LayerTime)
        assert whole.saved_bytes is not None
        assert whole.saved_bytes >= 1.5 * block.saved_bytes
        assert three.saved_bytes == pytest.approx(1.5 * block.saved_bytes, rel=0.02)
        assert again.saved_bytes == block.saved_bytes
    assert len(kernels) == 1
    assert None not in kernels
