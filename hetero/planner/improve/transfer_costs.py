"""Prices what a microbatch costs across the boundary between two stages; prices are remembered."""

from hetero.cost.network import TransferCost, transfer_cost
from hetero.cost.simulation.recent import Recent
from hetero.plan.ir import Stage
from hetero.plan.reshard import transfers
from hetero.planner.problem import Problem

MOST_KNOWN = 4096
"""Prices that are kept. A heuristic."""


class TransferCosts:
    """Prices transfers of plans for ``problem``."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: Recent[TransferCost] = Recent(MOST_KNOWN)

    def between(self, sender: Stage, receiver: Stage) -> TransferCost:
        """Of a microbatch of ``sender``, or the part of one that ``receiver`` takes at a time.

        Raises:
            ConfigError: two ranks that talk to one another have no link.
        """

        def cost() -> TransferCost:
            row_bytes = self._problem.model.hidden_size * self._problem.costs.element_bytes
            messages = transfers(sender, receiver, seq_length=self._problem.seq_length, phase=0)
            return transfer_cost(messages, self._problem.topology, row_bytes=row_bytes)

        key = tuple(
            (each.ranks, each.tp, each.dp, each.micro_batch_size, each.splits_sequence) for each in (sender, receiver)
        )
        return self._known.of(key, cost)
