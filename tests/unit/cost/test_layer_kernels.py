"""The kernels of a layer, by hand, and what follows from how it is implemented."""

import dataclasses
from typing import Any, get_args

import pytest

from hetero.cost.layers.kernels import MEMORY_SHARE, Kernels
from hetero.cost.layers.layer_kernels import (
    CONTENTION,
    FLASH_BACKWARD,
    ComputePass,
    KernelSeconds,
    LayerConfig,
    kernel_seconds,
)
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import AttentionKernel, GradientSums, LayerImplementation, LayerShape, ModuleKind
from tests.helpers.models import gpt2_model, llama_model, moe_model

SHEET = DataSheet(memory_gb_per_s=1000, fp32_tflops=10, fp16_tflops=100, multiprocessors=10, source="a test")
KERNELS = Kernels(DeviceType(name="unheard-of", data_sheet=SHEET), SHEET, arithmetic="fp16")
BYTES_PER_S = 1e12 * MEMORY_SHARE

PASSES: tuple[ComputePass, ...] = ("forward", "backward")
B, S, H, A, D, F, V = 2, 1024, 512, 8, 64, 2048, 4096
GPT = LayerShape.of(
    gpt2_model(
        hidden_size=H,
        num_attention_heads=A,
        num_query_groups=A,
        kv_channels=D,
        ffn_hidden_size=F,
        padded_vocab_size=V,
    )
)
FLASH = LayerImplementation(attention="flash")


def total_s(found: KernelSeconds) -> float:
    return found.linear_s + found.gradient_sums_s + found.attention_s + found.rows_s + found.collectives_s


def layer(kind: ModuleKind, implementation: LayerImplementation = FLASH, **changes: Any) -> LayerConfig:
    return LayerConfig(
        **{
            "kind": kind,
            "shape": GPT,
            "seq_length": S,
            "element_bytes": 2,
            "implementation": implementation,
            "tp": 1,
            "micro_batch_size": B,
            **changes,
        }
    )


def product_s(m: int, n: int, k: int, batch: int = 1) -> float:
    return KERNELS.product_s(m, n, k, element_bytes=2, batch=batch)


def seconds(config: LayerConfig, compute_pass: ComputePass) -> KernelSeconds:
    return kernel_seconds(KERNELS, config, compute_pass)


IMPLEMENTATIONS = [
    LayerImplementation(attention=attention, dropout=dropout, overlaps_collectives=overlaps, gradient_sums=sums)
    for attention in get_args(AttentionKernel)
    for dropout in (False, True)
    for overlaps in (False, True)
    for sums in (None, "separate")
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", [gpt2_model(), llama_model(), moe_model()], ids=["gpt2", "llama", "moe"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_attention_and_mlp_add_up_to_a_block(
    implementation: LayerImplementation, model: Any, tp: int, sequence_parallel: bool
) -> None:
    for compute_pass in PASSES:
        attention, mlp, block = (
            seconds(
                layer(
                    kind,
                    implementation,
                    shape=LayerShape.of(model),
                    tp=tp,
                    sequence_parallel=sequence_parallel,
                    all_reduce=linked(1.0),
                ),
                compute_pass,
            )
            for kind in ("attention", "mlp", "block")
        )
        assert attention + mlp == block
        assert total_s(attention) + total_s(mlp) == pytest.approx(total_s(block))
        assert mlp.attention_s == 0.0 < attention.attention_s


class TestByHand:
    """GPT's layer, fp16: T = 2 x 1024 tokens of 512 in 8 heads of 64, MLP of 2048."""

    T = B * S

    def test_products_once_in_a_forward_twice_in_a_backward(self) -> None:
        forward, backward = (seconds(layer("block"), each) for each in PASSES)
        shapes = [(self.T, 3 * H, H), (self.T, H, H), (self.T, F, H), (self.T, H, F)]
        assert forward.linear_s == pytest.approx(sum(product_s(*shape) for shape in shapes))
        assert forward.weight_gradients_s == 0.0
        assert backward.weight_gradients_s == pytest.approx(sum(product_s(n, k, m) for m, n, k in shapes))
        inputs_s = sum(product_s(m, k, n) for m, n, k in shapes)
        assert backward.linear_s == pytest.approx(inputs_s + backward.weight_gradients_s)

    def test_rows_that_move(self) -> None:
        """Norm 2 and residual 3 of each half, heads 3 h, activation of 2048 and its result; in a backward 3 and 2."""
        forward, backward = (seconds(layer("block"), each) for each in PASSES)
        assert forward.rows_s == pytest.approx(2 * self.T * (10 * H + 3 * H + 2 * F) / BYTES_PER_S)
        assert backward.rows_s == pytest.approx(2 * self.T * (10 * H + 3 * H + 3 * F) / BYTES_PER_S)

    def test_dropout_moves_a_mask_of_a_byte_per_element(self) -> None:
        masked = LayerImplementation(attention="flash", dropout=True)
        for each in PASSES:
            more_s = seconds(layer("block", masked), each).rows_s - seconds(layer("block"), each).rows_s
            assert more_s == pytest.approx(2 * self.T * H / BYTES_PER_S)

    def test_flash_attention_has_half_the_operations_and_no_scores(self) -> None:
        forward, backward = (seconds(layer("attention"), each).attention_s for each in PASSES)
        operations = 2 * S**2 * B * H
        assert forward == pytest.approx(KERNELS.flash_s(operations, backward=False))
        assert backward == pytest.approx(KERNELS.flash_s(FLASH_BACKWARD * operations, backward=True))

    @pytest.mark.parametrize(
        ("attention", "dropout", "element_bytes", "forward_moves", "backward_moves"),
        [
            ("fused-softmax", False, 2, 2, 3),
            ("fused-softmax", True, 2, 2 + 2.5, 3 + 2.5),
            ("fused-softmax", False, 4, 6, 9),
            ("fused-softmax", True, 4, 6 + 2.25, 9 + 2.25),
            ("unfused", False, 4, 6, 18),
        ],
    )
    def test_scores_move(
        self,
        attention: AttentionKernel,
        dropout: bool,
        element_bytes: int,
        forward_moves: float,
        backward_moves: float,
    ) -> None:
        """Beside products of queries and keys, and of scores and values: two, or four in a backward."""
        implementation = LayerImplementation(attention=attention, dropout=dropout)
        config = layer("attention", implementation, element_bytes=element_bytes)
        to_s = KERNELS.product_s(S, S, D, element_bytes=element_bytes, batch=A * B)
        from_s = KERNELS.product_s(S, D, S, element_bytes=element_bytes, batch=A * B)
        scores = element_bytes * A * B * S**2
        forward, backward = (seconds(config, each).attention_s for each in PASSES)
        assert forward == pytest.approx(to_s + from_s + forward_moves * scores / BYTES_PER_S)
        assert backward == pytest.approx(2 * (to_s + from_s) + backward_moves * scores / BYTES_PER_S)

    def test_the_loss_moves_its_logits_in_fp32(self) -> None:
        """8 times in a forward and 3 in a backward, and a cast from or to half precision; the norm reads and writes."""
        forward, backward = (seconds(layer("head"), each) for each in PASSES)
        logits, norm = self.T * V, 2 * 2 * self.T * H
        assert forward.rows_s == pytest.approx((logits * (8 * 4 + 6) + norm) / BYTES_PER_S)
        assert backward.rows_s == pytest.approx((logits * (3 * 4 + 6) + norm) / BYTES_PER_S)
        assert forward.linear_s == pytest.approx(product_s(self.T, V, H))
        assert backward.linear_s == pytest.approx(product_s(self.T, H, V) + product_s(V, H, self.T))
        full = [seconds(layer("head", element_bytes=4), each).rows_s for each in PASSES]
        assert full == pytest.approx([(logits * 4 * moves + 2 * norm) / BYTES_PER_S for moves in (8, 3)])

    def test_an_embedding_reads_and_writes_rows(self) -> None:
        assert total_s(seconds(layer("embedding"), "forward")) == pytest.approx(2 * 2 * self.T * H / BYTES_PER_S)


class TestShapes:
    def test_attention_of_any_kind_is_cheaper_the_less_it_writes(self) -> None:
        for each in PASSES:
            flash, fused, unfused = (
                total_s(seconds(layer("attention", LayerImplementation(attention=attention)), each))
                for attention in ("flash", "fused-softmax", "unfused")
            )
            assert flash < fused < unfused

    def test_a_gate_is_another_product_as_wide(self) -> None:
        gated = dataclasses.replace(GPT, gated=True)
        tokens = B * S
        found = seconds(layer("mlp", shape=gated), "forward")
        assert found.linear_s == pytest.approx(product_s(tokens, 2 * F, H) + product_s(tokens, H, F))
        more_s = found.rows_s - seconds(layer("mlp"), "forward").rows_s
        assert more_s == pytest.approx(2 * tokens * F / BYTES_PER_S)

    def test_fewer_groups_of_keys_are_fewer_columns(self) -> None:
        grouped = dataclasses.replace(GPT, query_groups=2)
        tokens = B * S
        found = seconds(layer("attention", shape=grouped), "forward")
        assert found.linear_s == pytest.approx(product_s(tokens, H + 2 * 2 * D, H) + product_s(tokens, H, H))
        assert found.attention_s == seconds(layer("attention"), "forward").attention_s, "as many scores"

    def test_experts_work_on_copies_of_the_tokens(self) -> None:
        two = dataclasses.replace(GPT, num_experts=4, experts_per_token=2)
        found, alone = seconds(layer("mlp", shape=two), "forward"), seconds(layer("mlp"), "forward")
        assert found.linear_s == pytest.approx(product_s(2 * B * S, F, H) + product_s(2 * B * S, H, F))
        assert found.rows_s - alone.rows_s == pytest.approx(2 * B * S * 2 * F / BYTES_PER_S)

    def test_tensor_parallelism_divides_all_but_norms_and_sums(self) -> None:
        tokens = B * S
        found = seconds(layer("block", tp=4), "forward")
        shapes = [(tokens, 3 * H // 4, H), (tokens, H, H // 4), (tokens, F // 4, H), (tokens, H, F // 4)]
        assert found.linear_s == pytest.approx(sum(product_s(*shape) for shape in shapes))
        assert found.rows_s == pytest.approx(2 * tokens * (10 * H + (3 * H + 2 * F) / 4) / BYTES_PER_S)
        assert found.attention_s == pytest.approx(seconds(layer("block"), "forward").attention_s / 4)

    def test_sequence_parallelism_divides_norms_and_sums_too(self) -> None:
        config = layer("block", tp=4, all_reduce=linked(1.0))
        cut, whole = (seconds(dataclasses.replace(config, sequence_parallel=each), "forward") for each in (True, False))
        assert whole.rows_s - cut.rows_s == pytest.approx(0.75 * 2 * B * S * 10 * H / BYTES_PER_S)
        assert cut.collectives_s == whole.collectives_s, "a reduce-scatter and an all-gather are an all-reduce"
        assert (cut.linear_s, cut.attention_s) == (whole.linear_s, whole.attention_s)


def linked(gb_per_s: float, *, latency_us: float = 0.0) -> tuple[GroupLink, ...]:
    return (GroupLink(size=4, bus=Link(bandwidth_gb_per_s=gb_per_s, latency_us=latency_us)),)


class TestCollectives:
    ROWS = 2 * B * S * H
    """Bytes of an all-reduce."""

    def of(self, compute_pass: ComputePass, gb_per_s: float, *, overlaps: bool = False, **changes: Any) -> float:
        implementation = LayerImplementation(attention="flash", overlaps_collectives=overlaps)
        config = layer("mlp", implementation, **{"tp": 4, "all_reduce": linked(gb_per_s), **changes})
        return seconds(config, compute_pass).collectives_s

    def test_one_all_reduce_per_half_and_pass(self) -> None:
        one_s = 2 * 3 / 4 * self.ROWS / 1e9
        for each in PASSES:
            assert self.of(each, 1.0) == pytest.approx(one_s)
            assert seconds(layer("block", tp=4, all_reduce=linked(1.0)), each).collectives_s == pytest.approx(2 * one_s)
        embedding = layer("embedding", tp=4, all_reduce=linked(1.0))
        assert [seconds(embedding, each).collectives_s for each in PASSES] == [pytest.approx(one_s), 0.0]
        assert seconds(layer("head", tp=4, all_reduce=linked(1.0)), "forward").collectives_s == 0.0

    def test_latency_counts_once_as_it_was_measured(self) -> None:
        config = layer("mlp", tp=4, all_reduce=linked(1.0, latency_us=1e6))
        assert seconds(config, "forward").collectives_s == pytest.approx(1.0 + self.of("forward", 1.0))

    def test_the_group_of_that_size_or_the_next_larger_or_the_largest(self) -> None:
        groups = tuple(
            GroupLink(size=n, bus=Link(bandwidth_gb_per_s=bandwidth, latency_us=0))
            for n, bandwidth in ((2, 2.0), (4, 1.0))
        )
        for tp, share, gb_per_s in ((2, 1 / 2, 2.0), (3, 2 / 3, 1.0), (4, 3 / 4, 1.0), (8, 7 / 8, 1.0)):
            found = self.of("forward", 1.0, tp=tp, all_reduce=groups)
            assert found == pytest.approx(2 * share * self.ROWS / (gb_per_s * 1e9))

    def test_nothing_without_tensor_parallelism_or_where_nothing_is_known(self) -> None:
        assert self.of("forward", 1.0, tp=1) == self.of("forward", 1.0, all_reduce=()) == 0.0

    @pytest.mark.parametrize("gb_per_s", [0.01, 1.0, 30.0, 1e4])
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_what_is_hidden_is_never_more_than_there_is(self, gb_per_s: float, sequence_parallel: bool) -> None:
        whole_s = self.of("backward", gb_per_s)
        exposed_s = self.of("backward", gb_per_s, overlaps=True, sequence_parallel=sequence_parallel)
        assert 0 < CONTENTION * whole_s <= exposed_s <= whole_s
        beside_s = seconds(layer("mlp", tp=4), "backward").weight_gradients_s
        assert whole_s - exposed_s <= (1 - CONTENTION) * beside_s + 1e-12
        assert self.of("forward", gb_per_s, overlaps=True) == whole_s, "in a forward nothing runs beside it"

    def test_a_short_one_hides_behind_the_weights_gradients_but_for_what_it_takes_from_them(self) -> None:
        whole_s = self.of("backward", 1e4)
        assert self.of("backward", 1e4, overlaps=True) == pytest.approx(CONTENTION * whole_s)

    def test_of_a_gather_and_a_scatter_only_the_scatter_can(self) -> None:
        whole_s = self.of("backward", 1e4)
        cut_s = self.of("backward", 1e4, overlaps=True, sequence_parallel=True)
        assert cut_s == pytest.approx(whole_s / 2 + CONTENTION * whole_s / 2)

    def test_of_a_long_one_as_much_as_the_products_last(self) -> None:
        whole_s = self.of("backward", 0.01)
        beside_s = seconds(layer("mlp", tp=4), "backward").weight_gradients_s
        assert self.of("backward", 0.01, overlaps=True) == pytest.approx(whole_s - (1 - CONTENTION) * beside_s)


class TestGradientSums:
    """Weights of GPT's layer in fp16: 12 H^2 in a block, H V in the embedding and in the head; sums are fp32."""

    BLOCK = 12 * H**2

    def backward(self, kind: ModuleKind, sums: GradientSums | None, **changes: Any) -> KernelSeconds:
        return seconds(layer(kind, dataclasses.replace(FLASH, gradient_sums=sums), **changes), "backward")

    @pytest.mark.parametrize(("element_bytes", "moved"), [(2, 2 + 4 + 4), (4, 4 + 4 + 4)])
    @pytest.mark.parametrize(
        ("kind", "weights"), [("block", BLOCK), ("attention", 4 * H**2), ("mlp", 8 * H**2), ("head", H * V)]
    )
    def test_a_pass_of_its_own_reads_the_gradient_and_reads_and_writes_the_sum(
        self, kind: ModuleKind, weights: int, element_bytes: int, moved: int
    ) -> None:
        without, separate = (self.backward(kind, sums, element_bytes=element_bytes) for sums in (None, "separate"))
        assert without.gradient_sums_s == 0.0
        assert separate.gradient_sums_s == pytest.approx(moved * weights / BYTES_PER_S)
        assert dataclasses.replace(separate, gradient_sums_s=0.0) == without

    def test_each_expert_has_weights_of_its_own(self) -> None:
        shape = LayerShape.of(moe_model())
        assert shape.num_experts
        dense = dataclasses.replace(shape, num_experts=None, experts_per_token=None)
        all_of_them, one = (self.backward("mlp", "separate", shape=each) for each in (shape, dense))
        assert all_of_them.gradient_sums_s == pytest.approx(shape.num_experts * one.gradient_sums_s)

    def test_a_forward_adds_nothing(self) -> None:
        for kind in ("embedding", "block", "head"):
            assert seconds(layer(kind, dataclasses.replace(FLASH, gradient_sums="separate")), "forward") == seconds(
                layer(kind), "forward"
            )

    @pytest.mark.parametrize(
        ("kind", "sums", "is_fused"),
        [
            ("block", "fused", True),
            ("block", "fused_in_blocks", True),
            ("mlp", "fused_in_blocks", True),
            ("head", "fused", True),
            ("head", "fused_in_blocks", False),
        ],
    )
    def test_a_product_that_adds_moves_the_sum_in_place_of_the_gradient(
        self, kind: ModuleKind, sums: GradientSums, is_fused: bool
    ) -> None:
        """Where memory is so slow that products take what their bytes do: 2 x 4 for each weight, and not 2."""
        sheet = dataclasses.replace(SHEET, memory_gb_per_s=1e-3)
        kernels = Kernels(DeviceType(name="unheard-of", data_sheet=sheet), sheet, arithmetic="fp16")
        weights = {"block": self.BLOCK, "mlp": 8 * H**2, "head": H * V}[kind]
        plain, found = (
            kernel_seconds(kernels, layer(kind, dataclasses.replace(FLASH, gradient_sums=each)), "backward")
            for each in (None, sums)
        )
        more_s = found.weight_gradients_s - plain.weight_gradients_s
        assert more_s == pytest.approx((8 - 2) * weights / (1e6 * MEMORY_SHARE) if is_fused else 0.0)
        assert (found.gradient_sums_s == 0.0) == is_fused

    @pytest.mark.parametrize(("element_bytes", "cast"), [(2, 2 * 4), (4, 0)])
    def test_where_all_sums_are_fused_the_embedding_adds_rows_of_tokens(self, element_bytes: int, cast: int) -> None:
        """To no more rows of the sum than it has."""
        for samples in (1, 8):
            found = self.backward("embedding", "fused", micro_batch_size=samples, element_bytes=element_bytes)
            moved = (element_bytes + cast) * samples * S * H + 2 * 4 * min(samples * S, V) * H
            assert total_s(found) == pytest.approx(moved / BYTES_PER_S)

    @pytest.mark.parametrize("sums", ["separate", "fused_in_blocks"])
    def test_the_embeddings_gradient_has_the_size_of_its_weight(self, sums: GradientSums) -> None:
        """It is set to zero, gets the rows of the tokens, and is added to the sum, whatever the number of tokens."""
        rows_s = 2 * 2 * B * S * H / BYTES_PER_S
        assert total_s(self.backward("embedding", None)) == pytest.approx(rows_s)
        for tp in (1, 2):
            found = self.backward("embedding", sums, tp=tp)
            assert found.gradient_sums_s == pytest.approx((2 + 4 + 4) * V // tp * H / BYTES_PER_S)
            assert found.rows_s == pytest.approx(rows_s + 2 * V // tp * H / BYTES_PER_S)
