"""Faults of a training run: checkpoints, data, flags, schedules of learning rate and weight decay."""

from tests.planted_faults.fault import Fault

TRAINING_FAULTS = (
    # Checkpoints.
    Fault(
        name="a part of a saved block is read from the block's start",
        kind="offset",
        file="hetero/checkpoint/reader.py",
        find="_Copy(index_within(edges, block.offsets), target)",
        replace="_Copy(tuple(slice(0, end - start) for start, end in edges), target)",
        hints=("tests/unit/checkpoint/test_reader.py",),
    ),
    Fault(
        name="full precision weights are loaded from the rounded ones",
        kind="stale weight",
        file="hetero/checkpoint/reader.py",
        find="order = [weights, master] if same else [master, weights]",
        replace="order = [weights, master]",
        hints=("tests/unit/checkpoint/test_reader.py", "tests/dist/test_half_precision_resume.py"),
    ),
    Fault(
        name="a save in the background has the weights of the next step",
        kind="stale weight",
        file="hetero/checkpoint/writer.py",
        find="offsets=each.offsets, tensor=buffer",
        replace="offsets=each.offsets, tensor=source",
        hints=("tests/dist/test_checkpoint_save.py",),
    ),
    Fault(
        name="queries, keys and values of a converted model are not in groups",
        kind="order",
        file="hetero/checkpoint/interchange/families.py",
        find="return torch.cat(groups, dim=1).flatten(0, 1)",
        replace="return torch.cat([group.flatten(0, 1) for group in groups])",
        hints=("tests/unit/checkpoint/test_huggingface.py",),
    ),
    Fault(
        name="skipped steps count as updates in a checkpoint",
        kind="skipped step",
        file="megatron/training/checkpointing.py",
        find="adam_step=trainer.optimizer.num_updates",
        replace="adam_step=step",
        hints=("tests/dist/test_half_precision_resume.py",),
    ),
    Fault(
        name="a run that goes on draws other dropout than one that was not stopped",
        kind="random numbers",
        file="megatron/training/checkpointing.py",
        find="restore_dropout_state(rank_state)",
        replace="assert rank_state",
        hints=("tests/dist/test_resume.py",),
    ),
    Fault(
        name="a run that goes on forgets the good steps of its loss scale",
        kind="loss scale",
        file="megatron/training/checkpointing.py",
        find="trainer.scaler.clean_steps = state.loss_scaler.growth_tracker",
        replace="trainer.scaler.clean_steps = 0",
        hints=("tests/dist/test_half_precision_resume.py",),
    ),
    # Data.
    Fault(
        name="a run that goes on reads the data from the start",
        kind="offset",
        file="megatron/training/training.py",
        find="first_step=start_step,",
        replace="first_step=0,",
        hints=("tests/e2e/test_long_runs.py",),
    ),
    Fault(
        name="ranks that read data draw from the generator of dropout",
        kind="random numbers",
        file="megatron/training/data.py",
        find="generator=torch.Generator(),",
        replace="generator=None,",
        hints=("tests/unit/training/test_data.py",),
    ),
    Fault(
        name="--eod-mask-loss has no effect",
        kind="ignored flag",
        file="megatron/training/data.py",
        find="eod_mask_loss=config.eod_mask_loss,",
        replace="eod_mask_loss=False,",
        hints=("tests/unit/training/test_data.py",),
    ),
    # Flags and schedules.
    Fault(
        name="--adam-beta2 has no effect",
        kind="ignored flag",
        file="megatron/training/training.py",
        find="betas=(config.adam_beta1, config.adam_beta2),",
        replace="betas=(config.adam_beta1, 0.999),",
        hints=("tests/unit/training/test_optimizer_settings.py",),
    ),
    Fault(
        name="--hetero-heartbeat-timeout has no effect",
        kind="ignored flag",
        file="megatron/training/launch.py",
        find="lost_after_s=config.heartbeat_timeout_s, ",
        replace="",
        hints=("tests/unit/training/test_launch.py", "tests/faults/test_faults.py"),
    ),
    Fault(
        name="weight decay reaches its end with the learning rate",
        kind="wrong divisor",
        file="megatron/training/param_scheduler.py",
        find="wd_incr_steps=train_samples,",
        replace="wd_incr_steps=decay_samples,",
        hints=("tests/unit/training/test_optimizer_settings.py",),
    ),
)
