"""Evaluates: the loss on data that is not trained on."""

from dataclasses import dataclass

from hetero.distributed.process_groups import ParallelContext
from hetero.plan.batch_shares import with_batch_size
from hetero.plan.ir import Plan
from hetero.runtime.microbatch import DataPrefetcher
from hetero.runtime.trainer import Trainer, reads_data
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.data import SampleDataset, Split, microbatches


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Computes the loss on one set of samples, always the same ones, whenever it is asked.

    split: the name under which it is reported.
    plan: says how the ranks share a batch; that of the run, or what it is for batches of another size.
    num_batches: global batches.
    """

    split: Split
    plan: Plan
    dataset: SampleDataset
    num_batches: int
    num_workers: int

    def loss(self, context: ParallelContext, trainer: Trainer) -> float:
        """Return the mean loss over the loss tokens of all samples; collective over the world."""
        data = self._batches(context)
        loss_sum, num_tokens = 0.0, 0
        for _ in range(self.num_batches):
            batches = None
            if data is not None:
                batches = data.take()
                data.fetch()
            loss, tokens = trainer.evaluate(batches)
            loss_sum, num_tokens = loss_sum + loss, num_tokens + tokens
        return loss_sum / num_tokens if num_tokens else 0.0

    def _batches(self, context: ParallelContext) -> DataPrefetcher | None:
        if context.work is None or not reads_data(context):
            return None
        data = microbatches(
            self.dataset,
            self.plan,
            context.work.placement,
            first_step=0,
            num_steps=self.num_batches,
            num_workers=self.num_workers,
        )
        return DataPrefetcher(data, context.device)


def evaluated_plan(config: PretrainConfig, plan: Plan) -> Plan:
    """Return ``plan`` for the batches of evaluations, which may have another size than those of training."""
    size = config.run.eval_global_batch_size
    return plan if size is None else with_batch_size(plan, size)


def evaluated_splits(config: PretrainConfig) -> tuple[Split, ...]:
    """Name what this run evaluates: validation data, and test data at the end where it has a path of its own."""
    if config.run.eval_iters == 0:
        return ()
    return ("valid", "test") if config.data.test_data_path else ("valid",)
