"""Fused functions of every size are compiled for that size, as in a training, which has one."""

from collections.abc import Callable, Iterator

import pytest
import torch

from hetero.profiling.compiled_shapes import compile_for_each_shape, num_compiled_graphs


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Counting:
    """Compiles nothing, and keeps the sizes of what it was to compile, ``any`` for a graph of all sizes."""

    def __init__(self) -> None:
        self.sizes: list[object] = []
        self.eager_runs = 0

    def compile(self) -> Callable[[torch.Tensor], torch.Tensor]:
        def double(tensor: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                self.eager_runs += 1
            return tensor * 2

        def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
            # A size that may vary is an input, before the tensor that has it.
            (tensor,) = (each for each in inputs if isinstance(each, torch.Tensor))
            self.sizes.append("any" if len(inputs) > 1 else tensor.shape[0])
            return graph.forward

        return torch.compile(double, backend=backend)


def test_every_size_has_a_graph_of_its_own() -> None:
    """Sixteen, twice each; outside there is one for all from the second size on."""
    counting, before = Counting(), num_compiled_graphs()
    double = counting.compile()
    with compile_for_each_shape():
        for size in 2 * [*range(2, 18)]:
            assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
    assert counting.sizes == [*range(2, 18)]
    assert num_compiled_graphs() - before == 16
    assert counting.eager_runs == 0


def test_without_it_the_second_size_has_another_kernel() -> None:
    """What torch.compile does by itself, so that the test above says something."""
    counting = Counting()
    double = counting.compile()
    for size in (2, 3, 4):
        double(torch.ones(size))
    assert counting.sizes == [2, "any"]


def test_a_function_that_asks_for_all_sizes_has_them() -> None:
    """As fused functions of experts have to, which get other numbers of tokens in every microbatch."""
    counting = Counting()
    double = counting.compile()
    with compile_for_each_shape():
        for size in (5, 6, 7, 8):
            tensor = torch.ones(size)
            torch._dynamo.mark_dynamic(tensor, 0)
            double(tensor)
    assert counting.sizes == ["any"]
