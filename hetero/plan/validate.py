"""Checks that a plan is legal, one rule per function, in plain Python.

The planner calls :func:`validate` on its own answer, the launcher and every rank on the file they load, so that
all ranks fail together and before the first collective. A message names the stage, the value, the limit and the fix.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from hetero.errors import PlanError
from hetero.plan.communicators import check_communicators
from hetero.plan.depths import deadlocks, enough_in_flight
from hetero.plan.device_rules import check_devices_are_known, check_devices_can_do_the_precision, check_fp8
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload_rules import check_offload
from hetero.schedule.orders import BY_DEPTHS, ORDERS
from hetero.spec.model import ModelSpec, first_difference, sequence_length_error
from hetero.spec.parameters import stage_parameters
from hetero.text import in_halves

MAX_MICROBATCHES = 100_000
"""Of a stage in a step: several times the samples of the largest batches that models are trained with."""


def check_numbers_are_positive(plan: Plan) -> None:
    """Sizes, degrees, depths and shares are at least 1, and there is a replica with a stage."""
    for name in ("seq_length", "global_batch_size"):
        if getattr(plan, name) < 1:
            raise PlanError(f"plan: {name} is {getattr(plan, name)}, must be at least 1")
    if not plan.replicas:
        raise PlanError("plan: no replicas, at least one must hold the model")
    for r, replica in enumerate(plan.replicas):
        if replica.num_samples < 1:
            raise PlanError(
                f"replica {r}: num_samples is {replica.num_samples}, must be at least 1; remove the replica"
            )
        if not replica.stages:
            raise PlanError(f"replica {r}: no stages, at least one must hold the layers")
    for where, stage in _named_stages(plan):
        for name in ("tp", "dp", "micro_batch_size", "in_flight", "optimizer_share"):
            if getattr(stage, name) < 1:
                raise PlanError(f"{where}: {name} is {getattr(stage, name)}, must be at least 1")


def check_each_replica_covers_all_layers(plan: Plan) -> None:
    """The stages of a replica hold every layer once, in order."""
    for r, replica in enumerate(plan.replicas):
        expected = 0
        for s, stage in enumerate(replica.stages):
            where = _name(r, s)
            if stage.first_layer < 0:
                raise PlanError(f"{where}: first_layer is {stage.first_layer}, layers count from 0")
            if stage.first_layer > expected:
                raise PlanError(
                    f"{where}: layers [{expected}, {stage.first_layer}) are in no stage; "
                    f"it starts at {stage.first_layer}, set first_layer to {expected}"
                )
            if stage.first_layer < expected:
                raise PlanError(
                    f"{where}: layers [{stage.first_layer}, {expected}) overlap with stage {s - 1}; "
                    f"set first_layer to {expected}"
                )
            if stage.end <= stage.start:
                raise PlanError(
                    f"{where}: holds no layers, [{in_halves(stage.start)}, {in_halves(stage.end)}); "
                    "give it at least half of one or list its ranks under idle_ranks"
                )
            expected = stage.end_layer
        if expected != plan.model.num_layers:
            raise PlanError(
                f"replica {r}: its stages end at layer {expected}, the model has {plan.model.num_layers}; "
                f"set end_layer of stage {len(replica.stages) - 1} to {plan.model.num_layers}"
            )


def check_halves_meet(plan: Plan) -> None:
    """Where a stage ends with the attention of a layer, the next one starts with its MLP."""
    for r, replica in enumerate(plan.replicas):
        if replica.stages[0].starts_with_mlp:
            raise PlanError(
                f"{_name(r, 0)}: starts_with_mlp is true, but no stage before it has the attention of layer "
                f"{replica.stages[0].first_layer}; set it to false"
            )
        if replica.stages[-1].ends_with_attention:
            raise PlanError(
                f"{_name(r, len(replica.stages) - 1)}: ends_with_attention is true, but no stage behind it has the MLP "
                f"of layer {replica.stages[-1].end_layer}; set it to false"
            )
        for s, (here, after) in enumerate(pairwise(replica.stages)):
            if here.ends_with_attention and not after.starts_with_mlp:
                raise PlanError(
                    f"{_name(r, s)} and stage {s + 1} both hold the attention of layer {here.end_layer}: "
                    f"set starts_with_mlp of stage {s + 1} to true, or ends_with_attention of stage {s} to false"
                )
            if after.starts_with_mlp and not here.ends_with_attention:
                raise PlanError(
                    f"{_name(r, s)} and stage {s + 1}: the attention of layer {here.end_layer} is in neither; "
                    f"set ends_with_attention of stage {s} to true, or starts_with_mlp of stage {s + 1} to false"
                )


def check_ranks_fill_each_stage(plan: Plan) -> None:
    """A stage lists tp x dp ranks."""
    for where, stage in _named_stages(plan):
        if len(stage.ranks) != stage.tp * stage.dp:
            raise PlanError(
                f"{where}: {len(stage.ranks)} ranks {list(stage.ranks)}, but tp {stage.tp} x dp {stage.dp} "
                f"needs {stage.tp * stage.dp}"
            )


def check_tp_groups_ascend(plan: Plan) -> None:
    """The ranks of a tp group ascend, as torch numbers those of a group: both mean the same by a tp rank then."""
    for where, stage in _named_stages(plan):
        for group in stage.tp_groups:
            if list(group) != sorted(group):
                raise PlanError(
                    f"{where}: the ranks of a tp group must ascend, got {list(group)}; list it as {sorted(group)}"
                )


def check_device_groups(plan: Plan) -> None:
    """Stages on the same ranks are one device group: alike in how these work together, and not next to one another."""
    alike = ("device", "tp", "dp", "sequence_parallel", "micro_batch_size", "fp8", "optimizer_share")
    for r, replica in enumerate(plan.replicas):
        for group in replica.device_groups:
            first = replica.stages[group[0]]
            for before, s in pairwise(group):
                stage = replica.stages[s]
                if s == before + 1:
                    raise PlanError(
                        f"{_name(r, before)} and stage {s} follow one another on the same ranks {list(stage.ranks)}; "
                        "make them one stage"
                    )
                for name in alike:
                    if getattr(stage, name) != getattr(first, name):
                        raise PlanError(
                            f"{_name(r, s)}: {name} is {getattr(stage, name)}, but stage {group[0]} on the same ranks "
                            f"has {getattr(first, name)}; make them equal"
                        )
        last = len(replica.stages) - 1
        if last > 0 and plan.model.tied_embeddings and replica.stages[0].ranks == replica.stages[last].ranks:
            raise PlanError(
                f"{_name(r, last)}: the head shares its weight with the embedding, which stage 0 has on the same ranks "
                f"{list(replica.stages[0].ranks)}; end the replica on other ranks, or untie the embedding"
            )


def check_schedule(plan: Plan) -> None:
    """The order that a replica names is in the table of orders."""
    for r, replica in enumerate(plan.replicas):
        if replica.schedule not in ORDERS:
            raise PlanError(
                f"replica {r}: there is no schedule {replica.schedule!r}; choose one of {', '.join(ORDERS)}"
            )


def check_each_rank_has_one_place(plan: Plan) -> None:
    """Ranks count from 0 without gaps, and each is in one device group or idle."""
    uses = Counter(plan.ranks())
    if repeated := sorted(rank for rank, count in uses.items() if count > 1):
        raise PlanError(
            f"plan: ranks {repeated} are named more than once; a rank is in one stage or in idle_ranks, or in several "
            "stages of one replica that list the same ranks"
        )
    missing = sorted(set(range(len(uses))) - set(uses))
    if missing:
        raise PlanError(
            f"plan: it names {len(uses)} ranks up to {max(uses)}, but not {missing}; "
            "number them from 0 without gaps, unused ones under idle_ranks"
        )


def check_samples_add_up(plan: Plan) -> None:
    """The replicas' shares add up to the global batch."""
    shares = [replica.num_samples for replica in plan.replicas]
    if sum(shares) != plan.global_batch_size:
        raise PlanError(
            f"plan: num_samples of the replicas {shares} add up to {sum(shares)}, "
            f"global_batch_size is {plan.global_batch_size}"
        )


def check_microbatches_divide(plan: Plan) -> None:
    """A stage's microbatch divides its replica's share, and of two neighbouring stages one divides the other."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            size = stage.samples_per_microbatch
            if replica.num_samples % size:
                raise PlanError(
                    f"{_name(r, s)}: micro_batch_size {stage.micro_batch_size} x dp {stage.dp} = {size} samples "
                    f"does not divide the replica's num_samples {replica.num_samples}"
                )
        for s, (here, after) in enumerate(pairwise(replica.stages)):
            small, large = sorted((here.samples_per_microbatch, after.samples_per_microbatch))
            if large % small:
                raise PlanError(
                    f"{_name(r, s)} and stage {s + 1}: microbatches of {here.samples_per_microbatch} and "
                    f"{after.samples_per_microbatch} samples; one must be a multiple of the other"
                )


def check_microbatches_can_be_listed(plan: Plan) -> None:
    """Microbatches are few enough to list: a schedule has actions for each, and so have simulator and trace."""
    for r, replica in enumerate(plan.replicas):
        for s in range(len(replica.stages)):
            count = replica.num_microbatches(s)
            if count > MAX_MICROBATCHES:
                raise PlanError(
                    f"{_name(r, s)}: {count:,} microbatches in a step, at most {MAX_MICROBATCHES:,} are; raise "
                    "micro_batch_size, or lower num_samples"
                )


class DeadlockError(PlanError):
    """The in-flight depths of a replica deadlock. Which would not takes many dry runs to find, so that is done when the
    message is read: a planner, which only goes on without such a plan, never reads it.

    Args:
        replica: the replica.
        r: its number.
    """

    def __init__(self, replica: Replica, r: int) -> None:
        super().__init__(replica, r)

    def __str__(self) -> str:
        replica, r = self.args
        enough, given = enough_in_flight(replica), [stage.in_flight for stage in replica.stages]
        if enough is None:
            return (
                f"replica {r}: its stages deadlock at any in_flight; let the ranks "
                f"{[list(replica.stages[group[0]].ranks) for group in replica.device_groups]} take turns in one order"
            )
        kind = "interleaved stages" if replica.is_interleaved else "stages"
        return f"replica {r}: in_flight {given} of its {kind} would deadlock; set it to {enough}"


def check_in_flight_is_deep_enough(plan: Plan) -> None:
    """No replica's depths deadlock: by formula for plain 1F1B, else by dry runs."""
    known: dict[object, bool] = {}
    for r, replica in enumerate(plan.replicas):
        if replica.is_interleaved or replica.schedule != BY_DEPTHS:
            _check_depths_by_dry_run(replica, r, known)
            continue
        for s, stage in enumerate(replica.stages):
            needed = least_in_flight(replica, s)
            if stage.in_flight < needed:
                raise PlanError(
                    f"{_name(r, s)}: in_flight {stage.in_flight} would deadlock: the stages behind it keep enough "
                    f"samples that it must send {needed} microbatches before its first backward; set it to {needed}"
                )


def _check_depths_by_dry_run(replica: Replica, r: int, known: dict[object, bool]) -> None:
    """``known`` are the replicas that ran before: in a plan of many, most are alike."""
    given = tuple(stage.in_flight for stage in replica.stages)
    key = (replica.schedule, replica.device_groups, replica.microbatch_counts, given)
    if key not in known:
        known[key] = deadlocks(replica)
    if known[key]:
        raise DeadlockError(replica, r)


def least_in_flight(replica: Replica, stage: int) -> int:
    """The smallest depth with which 1F1B does not deadlock at ``stage``, given the depth of the stage after it.

    With microbatches of a samples here and a' behind, and depths N and N': stage s + 1 runs its backward q after
    N' + q forwards, and this stage's backward m needs it for samples up to (m + 1) a, after sending (m + N) a.
    Both hold for every m if and only if

        N a >= (N' - 1) a' + max(a, a')

    unless all forwards come first anyway.
    """
    return -(-least_samples_in_flight(replica, stage) // replica.stages[stage].samples_per_microbatch)


def least_samples_in_flight(replica: Replica, stage: int) -> int:
    """The samples in a pipeline at and behind ``stage`` of which :func:`least_in_flight` speaks: N a above."""
    a = replica.stages[stage].samples_per_microbatch
    if stage + 1 == len(replica.stages):
        return a
    after = replica.stages[stage + 1]
    depth, a_after = min(after.in_flight, replica.num_microbatches(stage + 1)), after.samples_per_microbatch
    return min((depth - 1) * a_after + max(a, a_after), replica.num_samples)


def check_tp_divides(plan: Plan) -> None:
    """tp divides query groups (heads with them), vocabulary rows and every other cut dimension."""
    model = plan.model
    seen = set()
    for where, stage in _named_stages(plan):
        # In a plan of thousands of replicas most stages are alike.
        if (key := (stage.tp, stage.start, stage.end)) in seen:
            continue
        seen.add(key)
        heads = (("num_query_groups", model.num_query_groups), ("num_attention_heads", model.num_attention_heads))
        for name, size in (*heads, *_cut_sizes(model, stage.start, stage.end)):
            if size % stage.tp:
                fix = "change tp to one that does"
                if name == _VOCABULARY:
                    fix += f", or pad the vocabulary to a multiple of {stage.tp}"
                raise PlanError(f"{where}: tp {stage.tp} does not divide {name} {size}; {fix}")


@lru_cache(maxsize=1024)
def _cut_sizes(model: ModelSpec, start: float, end: float) -> tuple[tuple[str, int], ...]:
    """What tensor parallelism cuts in such a stage, with its size, each once.

    Remembered, since a planner checks the same stages again and again.
    """
    cut = (
        (_dimension(parameter.name), parameter.shape[parameter.shard_dim] // parameter.blocks)
        for parameter in stage_parameters(model, first_layer=start, end_layer=end)
        if parameter.shard_dim is not None
    )
    return tuple(dict.fromkeys(cut))


_VOCABULARY = "padded_vocab_size"


def _dimension(parameter_name: str) -> str:
    if "embedding" in parameter_name or "output_layer" in parameter_name:
        return _VOCABULARY
    return "moe_ffn_hidden_size" if ".experts." in parameter_name else "ffn_hidden_size"


def check_sequence_divides(plan: Plan) -> None:
    """With sequence parallelism tp divides the sequence."""
    for where, stage in _named_stages(plan):
        if stage.splits_sequence and plan.seq_length % stage.tp:
            raise PlanError(
                f"{where}: sequence_parallel with tp {stage.tp} does not divide seq_length {plan.seq_length}; change "
                "one, or leave sequence_parallel out"
            )


def check_sequence_fits_positions(plan: Plan) -> None:
    """The sequence is no longer than the model's."""
    if error := sequence_length_error(plan.model, plan.seq_length):
        raise PlanError(f"plan: {error}")


def check_dropout(plan: Plan) -> None:
    """Dropout, where the plan states it, leaves something."""
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(plan, name)
        if value is not None and not 0 <= value < 1:
            raise PlanError(f"plan: {name} is {value:g}, must be at least 0 and below 1")


def check_moe_uses_sequence_parallel(plan: Plan) -> None:
    """Experts under tensor parallelism come with sequence parallelism: megatron-core trains them in no other way."""
    if plan.model.num_experts is None:
        return
    for where, stage in _named_stages(plan):
        if stage.tp > 1 and not stage.sequence_parallel:
            raise PlanError(f"{where}: experts with tp {stage.tp} need sequence_parallel true, or tp 1")


def check_recompute(plan: Plan) -> None:
    """``recompute_num_layers`` comes with full recomputation, and is no more than the stage has."""
    for where, stage in _named_stages(plan):
        count = stage.recompute_num_layers
        if count is None:
            continue
        if stage.recompute != "full":
            raise PlanError(f"{where}: recompute_num_layers {count} needs recompute full, got {stage.recompute}")
        held = len(stage.layer_numbers)
        if not 1 <= count <= held:
            halves = ", halves counted as whole" if stage.num_layers < held else ""
            raise PlanError(f"{where}: recompute_num_layers {count} of a stage with {held} layers{halves}")


def check_wgrad_delay(plan: Plan) -> None:
    """No delay comes with full recomputation: delayed weight gradients would need the layer's forward a third time."""
    for where, stage in _named_stages(plan):
        if stage.wgrad_delay is None:
            continue
        if stage.wgrad_delay < 0:
            raise PlanError(
                f"{where}: wgrad_delay is {stage.wgrad_delay}, must be at least 0, or null for a backward in one"
            )
        if stage.recompute == "full":
            raise PlanError(
                f"{where}: wgrad_delay {stage.wgrad_delay} needs recompute none or selective, got full; "
                "set wgrad_delay to null or choose another recompute"
            )


def check_gradient_domains(plan: Plan) -> None:
    """Domains are disjoint sets of the plan's ranks, and leave no working rank out."""
    domains = plan.gradient_sync.domains
    if not domains:
        return
    known = set(plan.ranks())
    for d, ranks in enumerate(domains):
        if not ranks:
            raise PlanError(f"gradient_sync: domain {d} has no ranks; remove it")
        if strange := sorted(set(ranks) - known):
            raise PlanError(
                f"gradient_sync: domain {d} names ranks {strange}, the plan has 0 to {len(known) - 1}; remove them"
            )
    uses = Counter(rank for ranks in domains for rank in ranks)
    if repeated := sorted(rank for rank, count in uses.items() if count > 1):
        raise PlanError(f"gradient_sync: ranks {repeated} are named more than once; a rank is in one domain")
    if missing := sorted(known - set(plan.idle_ranks) - set(uses)):
        raise PlanError(
            f"gradient_sync: ranks {missing} work and are in none of the {len(domains)} domains; "
            "put each into the domain of its fast links, or into one of its own"
        )


def check_gradient_buckets(plan: Plan) -> None:
    """Buckets have room for an element."""
    numel = plan.gradient_sync.bucket_numel
    if numel is not None and numel < 1:
        raise PlanError(
            f"gradient_sync: bucket_numel is {numel}, must be at least 1; leave it out to take the launch's value"
        )


CHECKS = (
    check_numbers_are_positive,
    check_each_replica_covers_all_layers,
    check_halves_meet,
    check_ranks_fill_each_stage,
    check_tp_groups_ascend,
    check_device_groups,
    check_schedule,
    check_each_rank_has_one_place,
    check_samples_add_up,
    check_microbatches_divide,
    check_microbatches_can_be_listed,
    check_in_flight_is_deep_enough,
    check_tp_divides,
    check_sequence_divides,
    check_sequence_fits_positions,
    check_dropout,
    check_moe_uses_sequence_parallel,
    check_recompute,
    check_wgrad_delay,
    check_offload,
    check_devices_are_known,
    check_devices_can_do_the_precision,
    check_fp8,
    check_gradient_domains,
    check_gradient_buckets,
    check_communicators,
)


def validate(plan: Plan) -> None:
    """Applies all rules to ``plan``, and raises on the first one that it breaks.

    Raises:
        PlanError: the plan contradicts itself or its model.
        ConfigError: a stage names a device type that does not exist.
    """
    for check in CHECKS:
        check(plan)


def validate_launch(plan: Plan, *, world_size: int, model: ModelSpec, seq_length: int, global_batch_size: int) -> None:
    """Checks that ``plan`` is legal and made for this launch.

    Raises:
        PlanError: it names another number of ranks, another model, sequence length or batch.
    """
    validate(plan)
    if plan.world_size != world_size:
        raise PlanError(
            f"plan: it is for {plan.world_size} ranks ({len(plan.idle_ranks)} of them idle), "
            f"but {world_size} were launched; launch {plan.world_size} or make a plan for {world_size}"
        )
    if difference := first_difference(plan.model, model):
        raise PlanError(
            f"plan: it is for another model: it has {difference} as given by the flags; "
            "change the flags or make a plan for this model"
        )
    for name, value in (("seq_length", seq_length), ("global_batch_size", global_batch_size)):
        if getattr(plan, name) != value:
            raise PlanError(
                f"plan: {name} is {getattr(plan, name)}, but --{name.replace('_', '-')} is {value}; make them equal"
            )


def _name(replica: int, stage: int) -> str:
    return f"replica {replica} stage {stage}"


def _named_stages(plan: Plan) -> Iterator[tuple[str, Stage]]:
    for r, s, stage in plan.stages():
        yield _name(r, s), stage
