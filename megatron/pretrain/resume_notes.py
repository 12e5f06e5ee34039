"""Says what of a run is not as it was when the checkpoint that it goes on from was saved."""

from collections.abc import Mapping

from hetero.checkpoint.state import CheckpointState, DataState, RunSettings
from hetero.printable import printable
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.data import SampleDataset, Split
from megatron.pretrain.data_identity import describe_data
from megatron.pretrain.param_scheduler import lr_decay_samples, lr_warmup_samples


def run_settings(config: PretrainConfig, datasets: Mapping[Split, SampleDataset]) -> RunSettings:
    """Collect what a later run compares itself with.

    Raises:
        ConfigError: a file of the data is missing.
    """
    return RunSettings(
        data={split: describe_data(config.data, dataset, split=split) for split, dataset in datasets.items()},
        updates=_updates(config),
    )


def _updates(config: PretrainConfig) -> dict[str, bool | int | float | str]:
    optimizer, length = config.optimizer, config.run.train_samples
    values: dict[str, bool | int | float | str | None] = {
        "--lr": optimizer.lr,
        "--min-lr": optimizer.min_lr,
        "--decoupled-lr": optimizer.decoupled_lr,
        "--decoupled-min-lr": optimizer.decoupled_min_lr,
        "--lr-decay-style": optimizer.lr_decay_style,
        "--lr-decay-samples": lr_decay_samples(optimizer, train_samples=length),
        "--lr-warmup-samples": lr_warmup_samples(optimizer, train_samples=length),
        "--lr-warmup-init": optimizer.lr_warmup_init,
        "--lr-wsd-decay-style": optimizer.lr_wsd_decay_style if optimizer.lr_decay_style == "WSD" else None,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
        "--weight-decay-incr-style": optimizer.weight_decay_incr_style,
        "--adam-beta1": optimizer.adam_beta1,
        "--adam-beta2": optimizer.adam_beta2,
        "--adam-eps": optimizer.adam_eps,
        "--clip-grad": optimizer.clip_grad,
        "--hidden-dropout": config.stage.hidden_dropout,
        "--attention-dropout": config.stage.attention_dropout,
        "--moe-aux-loss-coeff": config.stage.moe_aux_loss_coeff,
        "--eod-mask-loss": config.data.eod_mask_loss,
    }
    if optimizer.weight_decay_incr_style == "constant":
        values["--weight-decay"] = optimizer.weight_decay
    else:
        values["--start-weight-decay"] = optimizer.start_weight_decay
        values["--end-weight-decay"] = optimizer.end_weight_decay
    return {flag: value for flag, value in values.items() if value is not None}


_IN_SAMPLES = {
    "--lr-decay-samples": " (or --lr-decay-iters, else the whole run)",
    "--lr-warmup-samples": " (or --lr-warmup-iters, --lr-warmup-fraction)",
    "--lr-wsd-decay-samples": " (or --lr-wsd-decay-iters)",
}


def resume_notes(state: CheckpointState, settings: RunSettings, *, train_samples: int) -> list[str]:
    """Return a sentence for each thing that is different, with the old value and the new one.

    Args:
        settings: of the run that goes on.
        train_samples: its length, as ``state`` counts it.
    """
    saved, notes = state.settings, []
    if saved is None:
        return _notes_of_length(state, train_samples, certain=False)
    if (before := saved.data.get("train")) is not None and (now := settings.data.get("train")) is not None:
        if before.order == now.order and before.content == now.content:
            notes += _notes_of_moved_data(before, now)
        else:
            notes += _notes_of_other_data(state, before, now) or _notes_of_length(state, train_samples, certain=True)
    notes += _notes_of_evaluation(state, saved, settings)
    for flag in sorted(saved.updates.keys() | settings.updates.keys()):
        old, new = saved.updates.get(flag, "not set"), settings.updates.get(flag, "not set")
        if old != new:
            notes.append(
                f"{flag}{_IN_SAMPLES.get(flag, '')}: {old} when step {state.step} was saved, {new} now, which counts "
                "from now on"
            )
    return notes


def _notes_of_evaluation(state: CheckpointState, saved: RunSettings, settings: RunSettings) -> list[str]:
    """Say where validation or test data has other tokens, unless :func:`_notes_of_other_data` says it of all data."""
    notes = []
    for split in ("valid", "test"):
        before, now = saved.data.get(split), settings.data.get(split)
        if before is None or now is None or now.split or before.content == now.content:
            continue
        notes.append(
            f"--{split}-data-path: {_shown(before)} when step {state.step} was saved, {_shown(now)} now: other tokens, "
            "whose losses do not compare with those before"
        )
    return notes


def _notes_of_moved_data(before: DataState, now: DataState) -> list[str]:
    if before.paths == now.paths:
        return []
    return [f"data: {_shown(before)} is {_shown(now)} now, with the same tokens in the same order"]


def _notes_of_other_data(state: CheckpointState, before: DataState, now: DataState) -> list[str]:
    """Say what of data and shares is different; nothing if the length of the run must have changed the order."""
    when = f"when step {state.step} was saved"
    if before.content != now.content:
        what = f"{_shown(before)} {when}, {_shown(now)} now"
        if before.paths == now.paths:
            what = f"{_shown(now)} was written again since step {state.step} was saved"
        return [f"data: {what}: from now on other tokens are trained on, in an order of their own"]
    if before.split != now.split:
        return [
            f"--split: {before.split or 'not used'} {when}, {now.split or 'not used'} now: from now on "
            "samples are drawn from other documents and in another order; some come again, and validation may see "
            "documents that were trained on"
        ]
    if before.paths != now.paths:
        return [
            f"data: {_shown(before)} {when}, {_shown(now)} now: the same tokens in other shares, so that from now on "
            "samples come in another order, some again before others come at all"
        ]
    return []


def _notes_of_length(state: CheckpointState, train_samples: int, *, certain: bool) -> list[str]:
    """Say that the order of the data is another one, which is only ``certain`` where both orders are known."""
    if state.train_samples is None or (state.train_samples == train_samples and not certain):
        return []
    if state.train_samples == train_samples:
        return [
            f"data: samples come in another order than when step {state.step} was saved, though data and flags are the "
            "same, as another version of megatron-core or numpy shuffles them; some come again before others come at "
            "all"
        ]
    length = f"the run was laid out for {state.train_samples} samples, now for {train_samples}"
    if certain:
        return [
            f"{length}: it goes through the data another number of times, for which all of it is shuffled again; some "
            "samples come again before others come at all"
        ]
    return [
        f"{length}: if it goes through the data another number of times (this checkpoint does not say), all of it is "
        "shuffled again, and some samples come again before others come at all"
    ]


def _shown(data: DataState) -> str:
    return printable(" ".join(data.paths)) or "made-up tokens (--mock-data)"
