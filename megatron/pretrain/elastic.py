"""Ties a run to elastic training: its agent, the copies that it goes on from, and those that it makes."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.checkpoint.reader import check_model
from hetero.checkpoint.state import CheckpointState, RunSettings
from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.timing import Timing
from hetero.elastic.copies import CopyWriter, RunMoment
from hetero.elastic.rank_reporter import RankReporter
from hetero.elastic.records import RankAssignment, RankPhase
from hetero.elastic.restoring import restore
from hetero.emulation.shrunk_model import small_model
from hetero.errors import CheckpointError, ConfigError
from hetero.plan.batch_sizes import BatchRampup
from hetero.plan.ir import Plan
from hetero.runtime.compute_seconds import ComputeSeconds, compute_seconds
from hetero.runtime.mcore import dropout_state
from hetero.runtime.trainer import Trainer
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec
from megatron.pretrain.checkpointing import RunStart, check_same_run, restore_scalars, run_state, say_what_differs
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.planning import described_model, planning_problem


def describe(config: PretrainConfig, path: Path) -> None:
    """Write what there is to plan, for whatever nodes there will be, as JSON; nobody trains.

    Raises:
        ConfigError: the flags do not leave the plan to a planner, a file that they name is wrong, or ``path`` cannot be
            written.
    """
    planner = config.parallel.planner
    if planner is None:
        raise ConfigError(
            "elastic training plans anew for the nodes that are there: give --hetero-cluster (or --hetero-emulate), "
            "with all node types that may come, and leave --hetero-plan out"
        )
    refuse_flags(config)
    model, tokenizer_vocab_size = described_model(config)
    problem = planning_problem(config, planner, model)
    if (emulation := config.emulation) is not None:
        small = small_model(model, vocab_size=tokenizer_vocab_size, seq_length=emulation.options.seq_length)
        problem = dataclasses.replace(problem, small_model=small)
    save(problem, path)


def refuse_flags(config: PretrainConfig) -> None:
    """Refuse flags that elastic training cannot follow: of what counts from the start of a process, and of batches that
    the plans of later epochs may not be able to share.

    Raises:
        ConfigError: one is given.
    """
    if (varying := config.parallel.varying_batch) is not None:
        fix = "leave it out" if isinstance(varying, BatchRampup) else "give --global-batch-size instead"
        raise ConfigError(
            f"{varying.flag} {varying}: elastic training keeps one batch under all of its plans; {fix}, or train "
            "without hetero elastic"
        )
    if (size := config.run.eval_global_batch_size) is not None:
        raise ConfigError(
            f"--eval-global-batch-size {size}: elastic training evaluates in batches of --global-batch-size, which all "
            "of its plans can share; leave it out and choose --eval-iters, or train without hetero elastic"
        )
    if (step := config.checkpoint.override_step) is not None:
        raise ConfigError(
            f"--override-ckpt-iteration {step}: elastic training loads a checkpoint whenever a job begins, and would "
            "go back each time; leave it out, and save a first checkpoint of the run without hetero elastic"
        )
    if config.run.exit_duration_minutes is not None:
        raise ConfigError(
            "--exit-duration-in-mins: the time of a rank begins anew with every epoch of elastic training; leave it "
            "out, and end the run with --train-iters or by 'hetero elastic leave' on every node"
        )


class ElasticRank:
    """One rank's part in an epoch of elastic training; without an assignment it does nothing.

    Args:
        assignment: what the rank's agent has told it.

    Raises:
        ConfigError: a flag asks for what elastic training does otherwise.
    """

    def __init__(self, assignment: RankAssignment | None, config: PretrainConfig, *, rank: int) -> None:
        self._assignment = assignment
        self._config = config
        self._reporter = RankReporter(assignment, rank) if assignment is not None else None
        self._copies: CopyWriter | None = None
        self._timing: ComputeSeconds | None = None
        self._began_s = time.monotonic()
        self._steps_done = 0
        self._goes_on_elsewhere = False
        if assignment is not None:
            refuse_flags(config)

    @property
    def is_on(self) -> bool:
        """Whether this rank has an agent."""
        return self._assignment is not None

    @property
    def plan(self) -> Plan | None:
        """That of the epoch, in place of what the flags say."""
        return self._assignment.epoch.plan if self._assignment is not None else None

    def present(self, cluster: ClusterSpec) -> ClusterSpec:
        """Of a described cluster the nodes that are there: those of the epoch, all of them where there is none.

        Raises:
            ConfigError: a node is of no type of the cluster file.
        """
        if self._assignment is None:
            return cluster
        # It loads the planner, which other runs do without.
        from hetero.elastic.planning_problem import present_cluster  # noqa: PLC0415

        return present_cluster(cluster, Counter(each.node.node_type for each in self._assignment.epoch.nodes))

    @property
    def goes_on_from_copies(self) -> bool:
        """Whether the epoch starts from a step that was copied, and not as the flags say."""
        return self._assignment is not None and self._assignment.epoch.start.epoch > 0

    @property
    def begins_a_job(self) -> bool:
        """Whether no node of this job has trained before: it goes on from the object store, if from anything."""
        return self._assignment is None or not any(self._assignment.epoch.sources.values())

    @property
    def is_later_epoch(self) -> bool:
        """Whether the run was there before this epoch."""
        if self._assignment is None:
            return False
        # The first epoch of a job may have a higher number than 1, and may go on from an object store.
        epoch = self._assignment.epoch
        return len(epoch.ids) > 1 or epoch.start.step > 0

    def timing(self, device: torch.device) -> Timing | None:
        """What measures the computes of this rank, for its agent; ``None`` where nobody asks."""
        if self._assignment is not None:
            self._timing = compute_seconds(device)
        return self._timing

    def failures(self) -> contextlib.AbstractContextManager[None]:
        """Tell the agent at once when an exception leaves the block."""
        return self._reporter.of_failures() if self._reporter is not None else contextlib.nullcontext()

    def report(self, phase: RankPhase, *, step: int = 0) -> None:
        """Tell the agent how far this rank is."""
        if self._reporter is not None:
            self._reporter.report(phase, step=step)

    def restore(
        self,
        context: ParallelContext,
        trainer: Trainer,
        scheduler: OptimizerParamScheduler,
        *,
        settings: RunSettings,
    ) -> RunStart:
        """Fill the state from the nearest copies, and return where the run goes on. Collective over the world.

        Raises:
            CheckpointError: a copy that this rank needs is nowhere whole.
            ConfigError: the copies are of another model, or of a run with other samples.
        """
        assignment, reporter = self._assignment, self._reporter
        assert assignment is not None, "goes on from copies"
        assert reporter is not None, "goes on from copies"
        otherwise = (
            "start the agents under another --job, with --load and --finetune to start a new run from its weights"
        )

        def check(where: str, state: CheckpointState) -> None:
            try:
                check_model(where, saved=state.model, wanted=context.plan.model)
            except CheckpointError as error:
                raise ConfigError(str(error)) from None
            check_same_run(where, state, self._config, context.plan, otherwise=otherwise)

        restored = restore(
            assignment,
            rank=context.rank,
            slices=trainer.optimizer.state(owner=None),
            report_bad=lambda copy: reporter.report("bad_copy", detail=copy),
            check=check,
        )
        state = restored.state
        trainer.finish_loading(num_updates=state.adam_step)
        restore_scalars(state, restored.rank_state, context, trainer, scheduler)
        say_what_differs(self._config, context, state, settings)
        options = self._config.stage
        if context.rank == 0:
            print(f"epoch {assignment.epoch.number}: goes on after step {state.step}, from copies", flush=True)
            if state.plan != context.plan and (options.hidden_dropout or options.attention_dropout):
                print(
                    "dropout: under another plan it draws other random numbers, so that from here on training is not "
                    "exactly what it would have been without the change of nodes",
                    flush=True,
                )
        return RunStart(state.step, state.generation_config or {}, settings)

    @contextmanager
    def copying(
        self,
        context: ParallelContext,
        trainer: Trainer,
        scheduler: OptimizerParamScheduler,
        *,
        start: RunStart,
    ) -> Iterator[None]:
        """Make copies while the block lasts, the first of what was restored, and commit the last when it ends.

        Collective over the world at both ends.

        Raises:
            CheckpointError: there is no room for copies; on every rank.
        """
        self.report("restored", step=start.step)
        if self._assignment is None or self._reporter is None:
            yield
            return

        def moment(step: int) -> RunMoment:
            state = run_state(self._config, context, trainer, scheduler, step=step, start=start)
            return RunMoment(state, dropout_state() if context.work is not None else {})

        copies = CopyWriter(
            self._assignment,
            context,
            trainer,
            moment=moment,
            start_step=start.step,
            every=self._config.checkpoint.copy_every,
            say=lambda news: print(news, flush=True),
        )
        self._copies = copies
        if self.goes_on_from_copies:
            copies.after_step(start.step)
        self._began_s, self._steps_done = time.monotonic(), start.step
        try:
            yield
            self._end(copies, self._reporter)
        finally:
            copies.close()

    def after_step(self, step: int, *, is_last: bool, goes_on_elsewhere: bool = False) -> None:
        """Begin a copy if it is due, and tell the agent of the step.

        Args:
            is_last: the ranks end after this step.
            goes_on_elsewhere: another epoch follows then.
        """
        if self._copies is None or self._reporter is None:
            return
        self._steps_done = step
        self._goes_on_elsewhere = goes_on_elsewhere
        self._copies.after_step(step, last=is_last)
        now_s = time.monotonic()
        self._reporter.report(
            "step",
            step=step,
            committed=self._copies.committed,
            step_s=now_s - self._began_s,
            compute_s=self._timing.end_step() if self._timing is not None else 0.0,
            copy_every=self._copies.every,
        )
        self._began_s = now_s

    def commit_copies(self) -> None:
        """Wait until the last copy is committed, or given up; collective over the world."""
        if self._copies is not None:
            self._copies.commit()

    def _end(self, copies: CopyWriter, reporter: RankReporter) -> None:
        """Commit the last copy, and tell the agent that this rank ends as planned; collective over the world."""
        copies.commit()
        reporter.report(
            "stopped" if self._goes_on_elsewhere else "finished",
            step=self._steps_done,
            committed=copies.committed,
            copy_every=copies.every,
        )
