"""AdamW on the gradient sums: clipping by the exact global norm, and one decision of all ranks to skip a step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime.grad_sync import GradientSync, NamedParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamOptions:
    """AdamW (arXiv 1711.05101). ``clip_grad`` bounds the global 2-norm of the gradients; 0 leaves them alone."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step.

    loss: mean over the loss tokens of the global batch.
    grad_norm: 2-norm of the whole gradient before clipping, every element of the model once.
    skipped: the norm was not finite, and no rank changed a weight.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    skipped: bool


class Optimizer:
    """The optimizer of one rank; without parameters on an idle one, which still joins the decisions."""

    def __init__(
        self,
        context: ParallelContext,
        parameters: NamedParameters,
        gradients: GradientSync | None,
        options: AdamOptions,
    ) -> None:
        self._context = context
        self._gradients = gradients
        self._options = options
        self.torch_optimizer = _adamw(parameters, options)

    @torch.no_grad()
    def step(self, *, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> StepResult:
        """Clip the finished gradient sums and update.

        One all-reduce (sum) over the world carries the squared norm, the loss and its token count, so that every
        rank, idle ones too, takes the same decision.

        Args:
            loss_sum: sum of the token losses that this rank counts, in float64; 0 on all but one rank per sample.
            num_tokens: how many tokens those are, in float64.
        """
        totals = torch.stack([self._owned_squares(), loss_sum, num_tokens])
        dist.all_reduce(totals, group=self._context.world)
        squares, loss, tokens = totals.tolist()
        norm = squares**0.5
        skipped = not torch.isfinite(totals[0]).item()
        if not skipped and self._gradients is not None:
            self._clip(norm)
            self.torch_optimizer.step()
        return StepResult(loss / tokens if tokens else 0.0, int(tokens), norm, skipped)

    def _owned_squares(self) -> torch.Tensor:
        """Sum of squares of the gradient elements that this rank answers for, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        if self._gradients is not None:
            for local in self._gradients.buckets:
                total += _sum_of_squares(local.owned_by(self._context.rank))
        return total

    def _clip(self, norm: float) -> None:
        if self._options.clip_grad <= 0:
            return
        factor = self._options.clip_grad / (norm + 1e-6)
        if factor < 1.0:
            gradients = [p.grad for group in self.torch_optimizer.param_groups for p in group["params"]]
            torch._foreach_mul_(gradients, factor)


def _sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64 of a vector of any precision.

    A float32 sum over millions of elements is off in the fifth digit, a float64 one twenty times slower; sums of
    short rows in float32, added up in float64, are neither.
    """
    row = 1024
    whole_rows = flat.numel() // row * row
    norms = torch.linalg.vector_norm(flat[:whole_rows].view(-1, row), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole_rows:]).double()
    return norms.square().sum() + rest.square()


def _adamw(parameters: NamedParameters, options: AdamOptions) -> torch.optim.AdamW:
    """Two groups, as Megatron has them: biases and one-dimensional weights do not decay.

    ``wd_mult`` is what megatron-core's parameter scheduler multiplies the current weight decay by.
    """
    decayed = [tensor for parameter, tensor in parameters.values() if parameter.decays]
    others = [tensor for parameter, tensor in parameters.values() if not parameter.decays]
    groups = [
        {"params": decayed, "wd_mult": 1.0, "weight_decay": options.weight_decay},
        {"params": others, "wd_mult": 0.0, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
