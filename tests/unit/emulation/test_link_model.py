"""What a message takes on the described links."""

import pytest

from hetero.cost.network import Topology
from hetero.emulation.cluster.link_model import LinkModel, MessageKey
from hetero.emulation.shrunk_model import small_plan
from hetero.plan.reshard import transfers_by_phase
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile


def test_a_message_keeps_its_wires_for_its_bytes_and_is_there_a_latency_later() -> None:
    """2 samples of 64 tokens with 32 channels in fp32: 16,384 bytes, in 2 s at so many per second."""
    model = gpt2_model()
    stages = (stage(layers=(s, s + 3), ranks=(s // 3,), mbs=2, device="A100-40") for s in (0, 3))
    described = plan(model, [replica(*stages, num_samples=4)], seq_length=64)
    small = small_plan(described, vocab_size=61, seq_length=16)
    cluster = nodes(2, gb_per_s=16_384 / 2 / 1e9, latency_us=3e6)
    links = LinkModel(
        described, small, Topology(cluster), cost_model(model, [profile(model)], seq_length=64), bucket_numel=1000
    )
    key = next(key for key in links.meetings if isinstance(key, MessageKey))
    (message,) = transfers_by_phase(*small.replicas[0].stages, seq_length=small.seq_length)[0]
    found = links.message(key, message)
    assert found.seconds == pytest.approx(2.0 + 3.0)
    assert len(found.wires) >= 2
    assert [busy_s for _, busy_s in found.wires] == pytest.approx([2.0] * len(found.wires))
