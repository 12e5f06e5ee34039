"""Holds the routing of tokens to experts fixed, so that trainings in other precisions can be compared.

Rounding sends some tokens to other experts, whose gradients are then those of other tokens.
"""

from collections import deque
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter

from hetero.runtime.trainer import Trainer

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FixedRouting:
    """Experts of every token, by the tokens of a microbatch and layer: recorded in one training, replayed in others.

    All of them train one stage, whose microbatches differ and whose backwards have the order of the forwards.
    """

    def __init__(self) -> None:
        self._experts: dict[tuple[bytes, int], torch.Tensor] = {}

    def record(self, trainer: Trainer, rank: int) -> None:
        """Remember which experts the routers of ``trainer`` choose, from the next microbatch on."""
        self._attach(trainer, replays=False)

    def replay(self, trainer: Trainer, rank: int) -> None:
        """Let the routers of ``trainer`` choose the experts that were recorded, with probabilities of their own."""
        self._attach(trainer, replays=True)

    def _attach(self, trainer: Trainer, *, replays: bool) -> None:
        (module,) = trainer._modules
        routers = [each for each in module.modules() if isinstance(each, TopKRouter)]
        for layer, router in enumerate(routers):
            router.router_replay = _RoutingOfLayer(layer, self._experts, replays=replays)
            module.register_forward_pre_hook(router.router_replay.begin_microbatch)


class _RoutingOfLayer:
    """Takes the place of megatron-core's ``RouterReplay`` of one layer, which knows one microbatch alone."""

    def __init__(self, layer: int, experts: dict[tuple[bytes, int], torch.Tensor], *, replays: bool) -> None:
        self._layer = layer
        self._experts = experts
        self._replays = replays
        self._microbatch = b""
        self._to_recompute: deque[bytes] = deque()

    def begin_microbatch(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._microbatch = inputs[0].cpu().numpy().tobytes()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of the experts of every token, both [N, topk]."""
        microbatch = self._microbatch
        if not torch.is_grad_enabled():
            self._to_recompute.append(microbatch)
        elif self._to_recompute:
            microbatch = self._to_recompute.popleft()
        key = (microbatch, self._layer)
        if self._replays:
            return scores.gather(1, self._experts[key]), self._experts[key]
        assert key not in self._experts, "two microbatches have the same tokens"
        scores_of_chosen, self._experts[key] = choose(scores, topk, num_groups, group_topk)
        return scores_of_chosen, self._experts[key]
