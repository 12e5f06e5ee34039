"""AdamW on the host has the bits of the optimizer on the device, whatever its chunks, threads, previews and factors."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.runtime.host_adamw import ALIGNMENT, BoundThreads, HostAdamW, HostUpdate

LR, BETAS, EPS = 0.01, (0.9, 0.95), 1e-8


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def threads() -> Iterator[BoundThreads]:
    with BoundThreads(cores()[:2]) as bound:
        yield bound


class OnTheDevice:
    """The optimizer of :mod:`hetero.runtime.optimizer` over the same range as one tensor."""

    def __init__(self, weights: torch.Tensor, main_dtype: torch.dtype, weight_decay: float) -> None:
        self.weights = weights.clone()
        self.main = weights.to(main_dtype).clone().requires_grad_()
        self.adamw = torch.optim.AdamW([self.main], lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, gradients: torch.Tensor, factor: float) -> None:
        self.main.grad = gradients.clone()
        if factor != 1.0:
            torch._foreach_mul_([self.main.grad], factor)
        self.adamw.step()
        self.weights.copy_(self.main)


def check_same_bits(host: HostAdamW, weights: torch.Tensor, device: OnTheDevice) -> None:
    assert torch.equal(weights, device.weights)
    assert torch.equal(host.main, device.main)
    state = device.adamw.state[device.main]
    if state:
        assert torch.equal(host.exp_avg, state["exp_avg"])
        assert torch.equal(host.exp_avg_sq, state["exp_avg_sq"])


steps = st.lists(
    st.fixed_dictionaries(
        {
            # Of the step: all of the gradient, clipped, clipped and unscaled; skipped after an overflow.
            "factor": st.sampled_from([1.0, 0.3217, 1.0 / 65536, None]),
            # Before it is known: nothing, or a preview with this factor.
            "previewed": st.sampled_from([None, 1.0, 0.3217, 1.0 / 65536]),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(
    numel=st.one_of(st.integers(1, 700), st.integers(1, 24).map(lambda each: each * ALIGNMENT)),
    chunk=st.integers(1, 6).map(lambda each: each * ALIGNMENT),
    dtypes=st.sampled_from(
        [
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
        ]
    ),
    weight_decay=st.sampled_from([0.0, 0.1]),
    steps=steps,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_the_bits_are_those_of_the_device(
    threads: BoundThreads,
    numel: int,
    chunk: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    weight_decay: float,
    steps: list[dict[str, float | None]],
    seed: int,
) -> None:
    dtype, main_dtype = dtypes
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(numel, generator=generator, dtype=main_dtype).to(dtype)
    device = OnTheDevice(weights, main_dtype, weight_decay)
    host = HostAdamW(weights.to(main_dtype).clone(), threads, previews=True, chunk_numel=chunk)
    number = 0
    for step in steps:
        gradients = torch.randn(numel, generator=generator, dtype=main_dtype)
        given_gradients = gradients.clone()
        before = (host.main.clone(), host.exp_avg.clone(), host.exp_avg_sq.clone())
        if step["previewed"] is not None:
            host.preview(gradients, update(number + 1, step["previewed"], weight_decay), weights=weights)
            assert all(torch.equal(*each) for each in zip(before, state_of(host), strict=True)), "nothing has changed"
            if step["previewed"] == step["factor"]:
                previewed = weights.clone()
        if step["factor"] is None:
            host.skip(weights=weights)
        else:
            number += 1
            was_right = host.commit(gradients, update(number, step["factor"], weight_decay), weights=weights)
            assert was_right == (step["previewed"] == step["factor"])
            if was_right:
                assert torch.equal(weights, previewed), "what had left stays"
            device.step(gradients, step["factor"])
        assert torch.equal(gradients, given_gradients), "the gradients are left alone"
        check_same_bits(host, weights, device)


def update(number: int, factor: float, weight_decay: float) -> HostUpdate:
    return HostUpdate(number=number, lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, factor=factor)


def state_of(host: HostAdamW) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return host.main, host.exp_avg, host.exp_avg_sq


def test_a_commit_after_a_right_preview_leaves_the_weights_alone(threads: BoundThreads) -> None:
    """They have left before; layers may read them meanwhile."""
    host = HostAdamW(torch.ones(256), threads, previews=True, chunk_numel=64)
    step = update(1, 1.0, 0.0)
    host.preview(torch.ones(256), step, weights=torch.empty(256))
    untouched = torch.full((256,), 7.0)
    assert host.commit(torch.ones(256), step, weights=untouched)
    assert untouched.eq(7.0).all()
    assert not host.commit(torch.ones(256), update(2, 1.0, 0.0), weights=untouched), "a preview serves once"
    assert torch.equal(untouched, host.main)


@pytest.mark.parametrize("wrong", [{"number": 2}, {"lr": 0.02}, {"factor": 0.5}, {"weight_decay": 0.1}])
def test_a_preview_of_something_else_is_made_again(threads: BoundThreads, wrong: dict[str, float]) -> None:
    host = HostAdamW(torch.ones(100), threads, previews=True)
    right = {"number": 1, "lr": LR, "factor": 1.0, "weight_decay": 0.0, "betas": BETAS, "eps": EPS}
    weights = torch.empty(100)
    host.preview(torch.ones(100), HostUpdate(**{**right, **wrong}), weights=weights)  # type: ignore[arg-type]
    assert not host.commit(torch.ones(100), HostUpdate(**right), weights=weights)  # type: ignore[arg-type]
    assert torch.equal(weights, host.main)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="kernels of other processors have no rest"
)
def test_other_chunks_do_not_give_the_bits_of_the_whole(threads: BoundThreads) -> None:
    """Why there is a rule about their size, and a test that would notice if it were broken."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(4096), torch.randn(4096)
    whole, cut = HostAdamW(weights.clone(), threads), HostAdamW(weights.clone(), threads, chunk_numel=64)
    cut._chunk_numel = 7
    for number in range(1, 6):
        for each in (whole, cut):
            each.commit(gradients, update(number, 0.3217, 0.1), weights=torch.empty(4096))
    assert not torch.equal(whole.main, cut.main)


@pytest.mark.parametrize("chunk_numel", [0, 63, 65, -64])
def test_chunks_that_would_round_otherwise_are_refused(threads: BoundThreads, chunk_numel: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_numel is {chunk_numel}, must be a multiple of 64"):
        HostAdamW(torch.ones(8), threads, previews=True, chunk_numel=chunk_numel)


def test_every_thread_is_bound_to_a_core_of_its_own_and_computes_alone(threads: BoundThreads) -> None:
    seen: dict[int, tuple[set[int], int]] = {}
    all_here = threading.Barrier(len(threads.cores))

    def look(_: int) -> None:
        seen[threading.get_ident()] = (os.sched_getaffinity(0), torch.get_num_threads())
        all_here.wait(timeout=60)

    threads.run(look, count=len(threads.cores))
    assert sorted(seen.values(), key=str) == [({core}, 1) for core in threads.cores]


def test_nobody_else_is_bound_or_has_fewer_threads() -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with BoundThreads(cores()[:1]):
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [before[0]]
        assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_what_a_thread_raises_is_raised(threads: BoundThreads) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise ValueError("chunk 3")

    with pytest.raises(ValueError, match="chunk 3"):
        threads.run(fail, count=8)
    done: list[int] = []
    threads.run(done.append, count=5)
    assert sorted(done) == list(range(5)), "they go on"


@pytest.mark.parametrize("wrong", [[], [0, 0], [10**6]])
def test_cores_that_cannot_be_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ConfigError, match="name each once, of those that this process may use"):
        BoundThreads(wrong)
