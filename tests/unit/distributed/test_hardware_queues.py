"""Every stream of a rank has a hardware queue of its own, or a launch with pipelines is refused."""

import pytest

from hetero.distributed.hardware_queues import check_hardware_queues
from hetero.errors import ConfigError
from tests.unit.plan.test_communicators import uniform


@pytest.mark.parametrize("given_value", ["1", "7", "none"])
def test_pipelines_need_a_queue_for_every_stream(given_value: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^environment: CUDA_DEVICE_MAX_CONNECTIONS is {given_value}, .* set it to 32"
    ):
        check_hardware_queues(uniform(pp=4), {"CUDA_DEVICE_MAX_CONNECTIONS": given_value})
    check_hardware_queues(uniform(pp=4), {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


def test_without_a_pipeline_one_queue_will_do() -> None:
    """As Megatron-LM's scripts set it for tensor parallelism."""
    check_hardware_queues(uniform(pp=1, world_size=4), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def test_without_a_word_cuda_has_eight() -> None:
    check_hardware_queues(uniform(pp=2), {})
    with pytest.raises(ConfigError, match=r"MAX_CONNECTIONS is 8, but a rank of this plan has 1\d streams"):
        check_hardware_queues(uniform(pp=4, world_size=8), {})
