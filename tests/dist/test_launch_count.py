"""The launches that the cost model counts are those of megatron-core's layers as the runtime builds them."""

import dataclasses
import json
import subprocess
import sys

from hetero.cost.layers.launches import num_launches
from hetero.cost.layers.layer_kernels import LayerConfig
from hetero.cost.runtime_model import HETERO_LAYERS
from hetero.spec.profile import LayerShape
from tests.helpers.launch_count import KINDS, MODELS


def test_priced_launches_are_those_that_the_layers_dispatch() -> None:
    """On a CPU, where a pass of its own adds the gradients of half-precision weights."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.launch_count"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    counted = json.loads(ran.stdout)
    priced = {
        name: {
            kind: [
                num_launches(
                    LayerConfig(
                        kind=kind,
                        shape=LayerShape.of(model()),
                        seq_length=16,
                        element_bytes=2,
                        implementation=dataclasses.replace(HETERO_LAYERS, gradient_sums="separate"),
                        tp=1,
                        micro_batch_size=2,
                    ),
                    compute_pass,
                )
                for compute_pass in ("forward", "backward")
            ]
            for kind in KINDS
        }
        for name, model in MODELS.items()
    }
    assert priced == counted
