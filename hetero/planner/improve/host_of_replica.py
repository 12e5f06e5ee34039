"""Asks what stages of one replica on one host keep on their devices, all else of the plan as it is."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cost.cost_model import StageConfig
from hetero.cost.gradient_volume import owned_parameters
from hetero.cost.host_memory import host_memory_of_ranks
from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.offload.blocks import ElementBytes, OffloadStage, offload_blocks, other_bytes
from hetero.cost.offload.host_rates import host_rates
from hetero.cost.offload.host_resources import HostResources
from hetero.cost.stage_memory import memory_of_stage, summed_at_once
from hetero.plan.communicators import gradient_communicators
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload import NOTHING_ON_HOST
from hetero.planner.problem import Problem
from hetero.units import GIB


@dataclass(frozen=True)
class HostOfReplica:
    """Replica ``r`` of a plan, whose stages on one host are asked about."""

    plan: Plan
    r: int
    problem: Problem

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[self.r]

    def question(self, stages: Sequence[int]) -> OffloadQuestion:
        """What to choose for these stages, all else as it is in the plan.

        Raises:
            ConfigError: the host cannot be asked for so many ranks.
        """
        priced = [self.problem.costs.stage(StageConfig.of(stage)) for stage in self.replica.stages]
        fill_s, drain_s = [0.0], [0.0]
        for each in priced:
            fill_s.append(fill_s[-1] + each.forward_s)
            drain_s.append(drain_s[-1] + each.backward_s)
        others = [each for s, each in enumerate(priced) if s not in stages]
        ranks = [rank for s in stages for rank in self.replica.stages[s].ranks]
        return OffloadQuestion(
            stages=tuple(self._stage(s, fill_s[s], drain_s[s]) for s in stages),
            host=self._host(ranks),
            num_microbatches=self.replica.num_microbatches(0),
            rest_s=sum(each.microbatch_s for each in others),
            rest_period_s=max((each.microbatch_s for each in others), default=0.0),
            may_speculate=self.problem.previews,
        )

    def _stage(self, s: int, fill_s: float, drain_s: float) -> OffloadStage:
        stage, problem = self.replica.stages[s], self.problem
        kept = dataclasses.replace(stage, recompute="none", recompute_num_layers=None, offload=NOTHING_ON_HOST)
        costs = problem.costs
        owned = owned_parameters(self.plan)
        parameters = costs.parameters_per_rank(
            device=stage.device, first_layer=stage.start, end_layer=stage.end, tp=stage.tp
        )
        most = max(owned[rank][s].numel for rank in stage.ranks)
        communicators = gradient_communicators(self.plan)
        num_gradient_groups = max(sum(rank in ranks for ranks in communicators) for rank in stage.ranks)
        memory = memory_of_stage(
            kept,
            costs,
            num_neighbours=(s > 0) + (s + 1 < len(self.replica.stages)),
            shares_gradients=num_gradient_groups > 0,
            num_gradient_groups=num_gradient_groups,
        )
        node_type = problem.node_type_of(stage.ranks[0])
        blocks = offload_blocks(costs, StageConfig.of(kept), optimizer_ways=parameters / most if most else 1.0)
        bucket_numel = summed_at_once(max(block.largest for block in blocks), costs)
        return OffloadStage(
            blocks=blocks,
            element_bytes=ElementBytes.of(costs),
            in_flight=stage.in_flight,
            capacity_bytes=node_type.memory_bytes,
            other_bytes=other_bytes(memory),
            bucket_bytes=costs.gradient_bytes * min(parameters, bucket_numel) if num_gradient_groups else 0,
            allocator_slack=costs.runtime.allocator_slack,
            cards=self._cards(stage),
            fill_s=fill_s,
            drain_s=drain_s,
        )

    def _cards(self, stage: Stage) -> tuple[int, ...]:
        """The ranks of a stage behind each switch of its node."""
        node_type = self.problem.node_type_of(stage.ranks[0])
        host = self.problem.cluster.node_types[node_type.index].host
        per_switch = host.gpus_per_switch if host is not None and host.to_host is not None else node_type.gpus_per_node
        behind = [0] * -(-node_type.gpus_per_node // per_switch)
        for rank in stage.ranks:
            behind[(rank - node_type.first_rank) % node_type.gpus_per_node // per_switch] += 1
        return tuple(behind)

    def _host(self, ranks: Sequence[int]) -> HostResources:
        """The part of a host that these of its ranks have while all others use theirs."""
        problem, node_type = self.problem, self.problem.node_type_of(ranks[0])
        described = problem.cluster.node_types[node_type.index]
        assert described.usable_host_memory_gib is not None
        node = problem.cluster.node_of_rank(ranks[0])
        taken = sum(
            memory.total
            for rank, memory in host_memory_of_ranks(self.plan, problem.costs).items()
            if rank not in ranks and problem.cluster.node_of_rank(rank) == node
        )
        left_bytes = max(0, int(described.usable_host_memory_gib * GIB) - taken)
        return HostResources.of_ranks(len(ranks), host_rates(described), memory_bytes=left_bytes)
