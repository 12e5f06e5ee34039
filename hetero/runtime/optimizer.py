"""Updates weights by AdamW: clips by the exact global gradient norm, and all ranks decide as one to skip a step.

It works on flat stretches of the buckets: all of them, or with a distributed optimizer (ZeRO-1, arXiv 1910.02054) the
shards that this rank owns. Half-precision weights have a float32 master copy of what is updated here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.host_adamw import HostUpdate
from hetero.runtime.host_optimizer import HostOptimizer
from hetero.runtime.loss_scaler import LossScaler
from hetero.runtime.sharded_state import TensorSlice
from hetero.runtime.update_groups import UpdateGroup, updated_places


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledRate:
    """Bounds the learning rate of the word embedding and the output layer, whose schedule has the shape of the others'.

    min_lr: what it decays to.
    """

    lr: float
    min_lr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamOptions:
    """AdamW (arXiv 1711.05101). ``clip_grad`` bounds the global 2-norm of the gradients; 0 leaves them alone.

    decoupled: the learning rate of embedding and output layer, ``None`` where it is that of all.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float
    decoupled: DecoupledRate | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step.

    loss: mean over the loss tokens of the global batch.
    grad_norm: 2-norm of the whole gradient before clipping, every element of the model once.
    skipped: the norm was not finite, and no rank changed a weight.
    loss_scale: by which this step's loss was multiplied; 1 unless training is fp16.
    stop: some rank has been told to end, or cannot read the data of the next step.
    votes: sums over all ranks of what each had to say beside.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    skipped: bool
    loss_scale: float = 1.0
    stop: bool = False
    votes: tuple[float, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(slots=True, eq=False)
class _UpdatedRange:
    """A range of a bucket that this rank updates, and whose weights are all of one group.

    main: in full precision what the optimizer updates: the weights themselves, or their master copy.
    """

    local: LocalBucket
    place: slice
    group: UpdateGroup
    main: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        return self.local.weights[self.place]

    @property
    def has_master(self) -> bool:
        return self.main.dtype != self.local.weights.dtype

    @torch.no_grad()
    def set_weights(self) -> None:
        """The weights from their master copy."""
        if self.has_master:
            self.weights.copy_(self.main)


class Optimizer:
    """Updates one rank's part of the weights; an idle rank has no buckets, and still joins the decisions.

    Args:
        scaler: of the loss, in fp16.
        host: updates what the plan leaves to it; the rest is updated here.
    """

    def __init__(
        self,
        context: ParallelContext,
        buckets: Sequence[LocalBucket],
        options: AdamOptions,
        *,
        scaler: LossScaler | None = None,
        host: HostOptimizer | None = None,
    ) -> None:
        self._context = context
        self._buckets = buckets
        self._options = options
        self._scaler = scaler
        self._host = host
        self._num_updates = 0
        on_device = [local for local in buckets if host is None or local.number not in host]
        self._ranges = [updated for local in on_device for updated in _updated_ranges(local, options)]
        self.torch_optimizer = _adamw(self._ranges, options)

    @property
    def num_updates(self) -> int:
        """Updates that were applied, also before what was loaded was saved; skipped steps are none."""
        return self._num_updates

    def begin(self) -> None:
        """A step begins: its gradients will be written where the last ones are."""
        if self._host is not None:
            self._host.begin(self._updates(1.0 / self._scale))

    @torch.no_grad()
    def agree(
        self,
        *,
        loss_sum: torch.Tensor,
        num_tokens: torch.Tensor,
        wants_stop: bool = False,
        votes: Sequence[float] = (),
    ) -> StepResult:
        """What all ranks make of the finished gradient sums: their norm, and whether there is an update.

        One all-reduce (sum) over the world carries the squared norm, the loss, its token count, and who wants to
        stop, so that every rank, idle ones too, takes the same decision. Here, once in a step, the host waits for the
        device.

        Args:
            loss_sum: sum of the token losses that this rank counts, in float64; 0 on all but one rank per sample.
            num_tokens: how many tokens those are, in float64.
            votes: numbers that are summed up beside, as many on every rank.
        """
        beside = [torch.full_like(num_tokens, each) for each in (float(wants_stop), *votes)]
        totals = torch.stack([self._owned_squares(), loss_sum, num_tokens, *beside])
        dist.all_reduce(totals, group=self._context.world)
        self._context.timing.meet()
        squares, loss, tokens, stop, *sums = totals.tolist()
        scale = self._scale
        norm = squares**0.5 / scale
        skipped = not math.isfinite(squares)
        if self._scaler is not None:
            self._scaler.update(overflow=skipped)
        return StepResult(loss / tokens if tokens else 0.0, int(tokens), norm, skipped, scale, stop > 0, tuple(sums))

    @torch.no_grad()
    def apply(self, result: StepResult) -> None:
        """Clip, and update what this rank updates; others may still have the old weights of that.

        What is left to the host is updated from now on, beside what comes next.
        """
        clip_factor = self._clip_factor(result.grad_norm)
        factor = clip_factor / result.loss_scale
        if self._host is not None:
            self._host.update(self._updates(factor))
            self._host.trusts_guesses = clip_factor == 1.0
        self._num_updates += 1
        self._scale_gradients(factor)
        self.torch_optimizer.step()
        self._set_weights()

    def skip(self) -> None:
        """There is no update in this step."""
        if self._host is not None:
            self._host.skip()
            self._host.trusts_guesses = False

    def state(self, *, owner: int | None) -> list[TensorSlice]:
        """Weights, their master copy and Adam's moments, as far as this rank updates them.

        What others own of the weights is gathered after it has been loaded, as after an update.

        Args:
            owner: of this only what that rank owns, to be saved: itself, or one that updates the same as this rank;
                ``None`` for all, to be loaded.
        """
        slices: list[TensorSlice] = []
        for local in self._buckets:
            within = local.summed if owner is None else local.updated_of(owner)
            slices += local.slices("weights", local.weights, first=0, within=within)
        for local, place, kinds in self._states():
            within = local.whole if owner is None else local.updated_of(owner)
            for kind, values in kinds.items():
                slices += local.slices(kind, values, first=place.start, within=within)
        return slices

    def _states(self) -> Iterator[tuple[LocalBucket, slice, dict[str, torch.Tensor]]]:
        """The state of each range by kind, wherever it lives, with its place in its bucket."""
        for updated in self._ranges:
            moments = self.torch_optimizer.state[updated.main]
            kinds = {"exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
            if updated.has_master:
                kinds["master"] = updated.main.detach()
            yield updated.local, updated.place, kinds
        for each in self._host.ranges() if self._host is not None else ():
            kinds = {"exp_avg": each.adamw.exp_avg, "exp_avg_sq": each.adamw.exp_avg_sq}
            if each.has_master:
                kinds["master"] = each.adamw.main
            yield each.local, each.place, kinds

    def finish_loading(self, *, num_updates: int) -> None:
        """The tensors of :meth:`state` have been written: make weights and masters agree with them.

        What others own is gathered by :meth:`hetero.runtime.trainer.Trainer.finish_loading`.
        """
        self._num_updates = num_updates
        for updated in self._ranges:
            self.torch_optimizer.state[updated.main]["step"].fill_(num_updates)
        self._set_weights()
        for each in self._host.ranges() if self._host is not None else ():
            each.loaded()

    def state_bytes(self) -> int:
        """Bytes of master weights and moments on this rank's device."""
        total = 0
        for updated in self._ranges:
            state = self.torch_optimizer.state[updated.main]
            tensors = [state["exp_avg"], state["exp_avg_sq"], *([updated.main] if updated.has_master else [])]
            total += sum(tensor.nbytes for tensor in tensors)
        return total

    @property
    def moves_state(self) -> bool:
        """What :meth:`state` returns is in other tensors after the next step: on some rank of the plan."""
        return any(stage.offload.speculate for _, _, stage in self._context.plan.stages())

    def host_bytes(self) -> int:
        """Bytes of its host's memory that this rank holds."""
        return self._host.nbytes if self._host is not None else 0

    @property
    def _scale(self) -> float:
        """By what the loss of this step is multiplied."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def _updates(self, factor: float) -> dict[UpdateGroup, HostUpdate]:
        """The update after those so far, of each group."""
        return {
            UpdateGroup(number): HostUpdate(
                number=self._num_updates + 1,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                factor=factor,
            )
            for number, group in enumerate(self.torch_optimizer.param_groups)
        }

    def _set_weights(self) -> None:
        for updated in self._ranges:
            updated.set_weights()

    def _owned_squares(self) -> torch.Tensor:
        """Sum of squares of the gradient elements that this rank owns, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        for local in self._buckets:
            total += _sum_of_squares(local.gradients[local.owned]).to(total.device)
        return total

    def _clip_factor(self, norm: float) -> float:
        if self._options.clip_grad <= 0:
            return 1.0
        return min(1.0, self._options.clip_grad / (norm + 1e-6))

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0 and self._ranges:
            torch._foreach_mul_([each.main.grad for each in self._ranges if each.main.grad is not None], factor)


def _updated_ranges(local: LocalBucket, options: AdamOptions) -> Iterator[_UpdatedRange]:
    for place, group in updated_places(local, decoupled=options.decoupled is not None):
        weights = local.weights[place]
        # The gradients are in full precision.
        main = weights if weights.dtype == local.gradients.dtype else weights.to(local.gradients.dtype)
        main = main.detach().requires_grad_()
        main.grad = local.gradients[place]
        yield _UpdatedRange(local, place, group, main)


def _sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64 of a vector of any precision.

    A float32 sum over millions of elements is off in the fifth digit, a float64 one twenty times slower; sums of
    short rows in float32, added up in float64, are neither.
    """
    row = 1024
    whole_rows = flat.numel() // row * row
    norms: torch.Tensor = torch.linalg.vector_norm(flat[:whole_rows].view(-1, row), dim=1).double()
    rest: torch.Tensor = torch.linalg.vector_norm(flat[whole_rows:]).double()
    return norms.square().sum() + rest.square()


def _adamw(ranges: Sequence[_UpdatedRange], options: AdamOptions) -> torch.optim.AdamW:
    """The groups of :class:`.UpdateGroup`, as Megatron has them: biases and one-dimensional weights do not decay.

    ``wd_mult`` is what megatron-core's parameter scheduler multiplies the current weight decay by, ``max_lr`` and
    ``min_lr`` what it takes for the bounds of a group that has its own. The moments exist from the start, so that what
    a rank needs is what it shows.
    """
    groups: list[dict[str, Any]] = [
        {"wd_mult": 1.0, "weight_decay": options.weight_decay},
        {"wd_mult": 0.0, "weight_decay": 0.0},
    ]
    if (decoupled := options.decoupled) is not None:
        bounds = {"lr": decoupled.lr, "max_lr": decoupled.lr, "min_lr": decoupled.min_lr}
        groups.append({"wd_mult": 1.0, "weight_decay": options.weight_decay, **bounds})
    for number, group in enumerate(groups):
        group["params"] = [each.main for each in ranges if each.group == number]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
    for updated in ranges:
        optimizer.state[updated.main] = {
            "step": torch.zeros((), dtype=torch.float32, device=updated.main.device),
            "exp_avg": torch.zeros_like(updated.main, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(updated.main, requires_grad=False),
        }
    return optimizer
