"""Imported once by the fork server of :mod:`tests.helpers.ranks`. Runs no torch operation: its threads do not fork."""

import gc
import os
import warnings

warnings.filterwarnings("ignore")
# These ranks are CPU processes, also on a host with GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from hetero.runtime import cpu_backend  # noqa: E402

cpu_backend.install()

import torch._dynamo  # noqa: E402, F401  (torch.optim imports it at its first step)
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402

import hetero.commands.elastic  # noqa: E402
import hetero.elastic.agent  # noqa: E402
import hetero.runtime.trainer  # noqa: E402, F401
import megatron.pretrain.training  # noqa: E402, F401
import tests.helpers.shared_memory_group  # noqa: E402, F401  (torch keeps a list of such groups)
from hetero.elastic.planning_problem import PlanningProblem  # noqa: E402
from hetero.elastic.records import Epoch, RankAssignment  # noqa: E402
from hetero.plan.ir import Plan  # noqa: E402
from hetero.serialization import adapter_of  # noqa: E402
from tests.helpers.process_state import state_of_this_process  # noqa: E402

for _record in (Plan, RankAssignment, Epoch, PlanningProblem):
    adapter_of(_record)

# megatron-core's 100,000 documents are 13 million samples of 16 tokens, whose order takes each rank 0.3 s to draw.
MockGPTLowLevelDataset.size = 30_000

# The ranks share what was imported here, and need not look through it for garbage.
gc.collect()
state_of_this_process()
gc.freeze()
