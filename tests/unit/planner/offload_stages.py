"""Random stages in whole MiB and microseconds, and the cheapest choice for them by trying every one.

The bytes and seconds are computed here anew from the numbers that describe a stage, on arrays of choices, and share
nothing with :mod:`hetero.cost.offload` or the planner's model. In whole units these round nothing but the time that
several threads take for updates, which the model takes up to a whole microsecond.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.offload.blocks import BlockChoice, ElementBytes, OffloadBlock, OffloadChoice, OffloadStage
from hetero.cost.offload.host_resources import HostResources
from hetero.spec.link import Link
from hetero.spec.profile import ModuleKind
from hetero.units import GB, MIB, US_PER_S

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

BF16 = ElementBytes(weight=2, gradient=4, device_state=12, host_state=12)

PREVIEW = 2
"""Times a direct update."""

WEIGHTS_PART = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)], dtype=np.int64)
"""Optimizer, gradients, weights of one block."""

ACTIVATIONS_PART = np.array([(0, 0), (1, 0), (0, 1)], dtype=np.int64)
"""Activations on the host, recomputation."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block in whole units: parameters in 2^20, saved in MiB, times in us."""

    kind: ModuleKind
    parameters: int
    largest: int
    ways: int
    saved: int
    again: int | None
    forward: int
    backward: int
    recompute: int
    update: int
    reads: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage in whole units."""

    blocks: tuple[Block, ...]
    in_flight: int
    capacity: int
    other: int
    bucket: int
    cards: tuple[int, ...]
    fill: int
    drain: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question in whole units: links and the adding of a rank in us per MiB, updates in us of a thread per 2^20
    parameters."""

    stages: tuple[Stage, ...]
    memory: int
    threads: int
    out: int
    into: int
    latency: int
    add: int
    update: int
    microbatches: int
    norm: int
    rest: int
    rest_period: int

    def described(self) -> OffloadQuestion:
        """As the planner is asked."""

        def link(us_per_mib: int) -> Link:
            return Link(bandwidth_gb_per_s=MIB * US_PER_S / us_per_mib / GB, latency_us=self.latency)

        return OffloadQuestion(
            stages=tuple(_described(stage) for stage in self.stages),
            host=HostResources(
                memory_bytes=self.memory * MIB,
                threads=self.threads,
                elements_per_s=self.threads * MIB * US_PER_S / self.update,
                to_device=link(self.into),
                to_host=link(self.out),
                added_bytes_per_s=MIB * US_PER_S / self.add,
                preview_factor=PREVIEW,
            ),
            num_microbatches=self.microbatches,
            norm_s=self.norm / US_PER_S,
            rest_s=self.rest / US_PER_S,
            rest_period_s=self.rest_period / US_PER_S,
        )


def _described(stage: Stage) -> OffloadStage:
    return OffloadStage(
        blocks=tuple(
            OffloadBlock(
                kind=b.kind,
                parameters=b.parameters * MIB,
                largest=b.largest * MIB,
                ways=b.ways,
                saved_bytes=b.saved * MIB,
                recomputed_bytes=None if b.again is None else b.again * MIB,
                forward_s=b.forward / US_PER_S,
                backward_s=b.backward / US_PER_S,
                recompute_s=b.recompute / US_PER_S,
                update_s=b.update / US_PER_S,
                forward_reads=b.reads[0],
                backward_reads=b.reads[1],
            )
            for b in stage.blocks
        ),
        element_bytes=BF16,
        in_flight=stage.in_flight,
        capacity_bytes=stage.capacity * MIB,
        other_bytes=stage.other * MIB,
        bucket_bytes=stage.bucket * MIB,
        cards=stage.cards,
        fill_s=stage.fill / US_PER_S,
        drain_s=stage.drain / US_PER_S,
    )


@dataclass(frozen=True)
class Costs:
    """What each of an array of choices takes, in MiB and us."""

    device: Ints
    host: Ints
    ends: Ints
    period: Ints
    out: Ints
    into: Ints
    wait: Ints

    def of(self, chosen: Ints) -> "Costs":
        return Costs(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def costs(question: Question, index: int, choices: Ints, speculate: Ints, threads: int) -> Costs:
    """Of one rank of a stage.

    choices: [choices, blocks, 5] in the order of ``BlockChoice``; speculate: [choices].
    """
    stage, m = question.stages[index], question.microbatches
    n = min(stage.in_flight, m)
    o, g, w, a, r = np.moveaxis(choices, -1, 0)

    def each(values: Iterator[int]) -> Ints:
        return np.array(list(values), dtype=np.int64)

    def copied(mib: Ints, us_per_mib: int) -> Ints:
        return np.where(mib > 0, question.latency + us_per_mib * mib, 0)

    blocks = stage.blocks
    own = each(b.parameters // b.ways for b in blocks)
    parameters, largest = each(b.parameters for b in blocks), each(b.largest for b in blocks)
    saved, again = each(b.saved for b in blocks), each(b.again or 0 for b in blocks)
    f, b, rs = each(b.forward for b in blocks), each(b.backward for b in blocks), each(b.recompute for b in blocks)
    reads_f, reads_b = each(b.reads[0] for b in blocks), each(b.reads[1] for b in blocks)
    shared = each(int(b.ways > 1) for b in blocks)

    device = stage.other + (2 * parameters * (1 - w) + 4 * parameters * (1 - g) + 12 * own * (1 - o)).sum(-1)
    device = device + (n * saved * (1 - a - r) + n * again * r).sum(-1) + (saved * r).max(-1)
    device = device + 2 * (2 * parameters * w).max(-1) + 2 * (2 * parameters * g).max(-1) + 4 * (saved * a).max(-1)
    device = device + (2 * largest * g).max(-1) + stage.bucket * g.max(-1)
    host = ((30 + 12 * speculate[:, None]) * own * o + n * saved * a).sum(-1) + (4 * largest * g).max(-1)
    host = host + (2 * (parameters - own) * w + 4 * (parameters - own) * g).sum(-1)

    weights_in = copied(2 * parameters, question.into)
    a_out, a_in = copied(saved, question.out) * a, copied(saved, question.into) * a
    g_out = copied(2 * parameters, question.out) * g
    g_sum = shared * copied(4 * parameters, question.into) * g
    adds = (g_out + question.add * 4 * parameters * g).sum(-1)
    w_gathered = shared * copied(2 * (parameters - own), question.out) * w
    w_forward, w_backward = reads_f * weights_in * w, reads_b * weights_in * w
    coming = (w_backward + a_in).sum(-1)
    backward_of = b + rs * r
    computes = f.sum(), backward_of.sum(-1)
    turn = np.zeros(len(choices), dtype=np.int64)
    for j in range(len(blocks)):
        late = a_out[:, j] + a_in[:, j] - (n - 1) * sum(computes)
        late = late - (f[j + 1 :].sum() + backward_of[:, j + 1 :].sum(-1))
        turn = np.maximum(turn, np.where(a[:, j] == 1, late, 0))
    forward = np.maximum(computes[0], np.maximum(a_out.sum(-1), w_forward.sum(-1)))
    backward = np.maximum.reduce([computes[1], coming, adds])
    first = np.maximum(computes[0], np.maximum((a_out + w_gathered).sum(-1), w_forward.sum(-1)))
    last = np.maximum.reduce([computes[1], coming + g_sum.sum(-1), adds])

    wait = _wait(question, stage, (o, g, w, backward_of), speculate, threads)
    return Costs(
        device=device,
        host=host,
        ends=first + last + turn,
        period=forward + backward + turn,
        out=(a_out + g_out).sum(-1),
        into=(a_in + w_forward + w_backward).sum(-1),
        wait=wait,
    )


def _wait(
    question: Question, stage: Stage, chosen: tuple[Ints, Ints, Ints, Ints], speculate: Ints, threads: int
) -> Ints:
    """Microseconds by which the next step begins later.

    chosen: whether the optimizer, gradients and weights are on the host, and the time of the backward, of each choice
        and block.
    """
    o, g, w, backward_of = chosen
    blocks = stage.blocks
    own = [block.parameters // block.ways for block in blocks]
    f = np.array([block.forward for block in blocks], dtype=np.int64)
    updates = np.array([block.update for block in blocks], dtype=np.int64)
    behind = [sum(other.cards[switch] for other in question.stages) for switch in range(len(stage.cards))]
    cards = max(total for total, mine in zip(behind, stage.cards, strict=True) if mine)
    arrive = np.full(len(o), -(10**12), dtype=np.int64)
    arrives = []
    for j in reversed(range(len(blocks))):
        ready = -stage.drain - backward_of[:, :j].sum(-1)
        own_out = question.latency + question.out * cards * 4 * own[j]
        whole = blocks[j].parameters
        added = question.latency + (question.out * 2 + question.add * 4) * whole
        added += (question.latency + question.into * 4 * whole + own_out) * (blocks[j].ways > 1)
        there = np.maximum(arrive, ready) + np.where(g[:, j] == 1, added, own_out)
        arrive = np.where(o[:, j] == 1, there, arrive)
        arrives.append(arrive)
    norm = np.zeros(len(o), dtype=np.int64)
    for j, arrive in enumerate(reversed(arrives)):
        norm = np.maximum(norm, arrive * g[:, j])
    norm = norm + question.norm
    wait: Ints = norm + (updates * (1 - o)).sum(-1) - stage.fill
    updated = np.zeros(len(o))
    received = np.zeros(len(o), dtype=np.int64)
    for j, arrive in enumerate(reversed(arrives)):
        updated = updated + np.where(speculate, PREVIEW, 1) * question.update * own[j] * o[:, j] / threads
        comes = o[:, j] * (1 - w[:, j] * (blocks[j].ways == 1))
        received = received + (question.latency + question.into * cards * 2 * own[j]) * comes
        start = np.where(speculate == 1, arrive, np.maximum(norm, arrive))
        worked = np.ceil(updated - 1e-6).astype(np.int64)
        fetch = blocks[j].reads[0] * (question.latency + question.into * 2 * blocks[j].parameters) * w[:, j]
        late = start + np.maximum(worked, received) + fetch - stage.fill - f[:j].sum()
        wait = np.where(o[:, j] == 1, np.maximum(wait, late), wait)
    return wait


def step(question: Question, of_stages: Sequence[Costs]) -> tuple[Ints, Ints]:
    """Microseconds of a step and MiB of the host, of choices for all stages; arrays that broadcast."""
    period: Ints = np.array(question.rest_period)
    wait: Ints = np.array(0)
    ends: Ints = np.array(question.rest)
    host: Ints = np.array(0)
    for stage, found in zip(question.stages, of_stages, strict=True):
        ranks = sum(stage.cards)
        period, wait, ends = np.maximum(period, found.period), np.maximum(wait, found.wait), ends + found.ends
        host = host + ranks * found.host
    for switch in range(len(question.stages[0].cards)):
        for name in ("out", "into"):
            copied: Ints = np.array(0)
            for stage, found in zip(question.stages, of_stages, strict=True):
                copied = copied + stage.cards[switch] * getattr(found, name)
            period = np.maximum(period, copied)
    return ends + (question.microbatches - 1) * period + wait, host


def arrays_of(choices: Sequence[OffloadChoice]) -> Iterator[tuple[Ints, Ints, int]]:
    """The arguments of :func:`costs` for one choice of each stage."""
    for choice in choices:
        yield np.array([choice.blocks], dtype=np.int64), np.array([choice.speculate], dtype=np.int64), choice.threads


def _patterns(part: Ints, blocks: int) -> Ints:
    """Every assignment of a row of ``part`` to each block: [assignments, blocks, columns]."""
    numbers = np.array(list(itertools.product(range(len(part)), repeat=blocks)))
    assigned: Ints = part[numbers]
    return assigned


def _parts(stage: Stage) -> tuple[Ints, Ints]:
    """All assignments for weights with what belongs to them, and for activations."""
    n = len(stage.blocks)
    fixed = [j for j, block in enumerate(stage.blocks) if block.again is None]
    activations = _patterns(ACTIVATIONS_PART, n)
    return _patterns(WEIGHTS_PART, n), activations[(activations[:, fixed, 1] == 0).all(-1)]


def every_choice(stage: Stage) -> tuple[Ints, Ints]:
    """All legal choices of a stage, with and without previews."""
    weights, activations = _parts(stage)
    p, q = np.divmod(np.arange(len(activations) * len(weights)), len(weights))
    choices = np.concatenate([weights[q], activations[p]], axis=-1)
    return np.concatenate([choices, choices]), np.repeat([0, 1], len(choices))


def least_step(question: Question) -> int | None:
    """Microseconds of the shortest step of one stage, by pricing every choice; ``None`` if nothing fits."""
    choices, speculate = every_choice(question.stages[0])
    found = costs(question, 0, choices, speculate, question.threads // sum(question.stages[0].cards))
    steps, host = step(question, [found])
    fits = (found.device <= question.stages[0].capacity) & (host <= question.memory)
    return int(steps[fits].min()) if fits.any() else None


def any_below(question: Question, limit: int) -> bool:
    """Whether any choice of the one stage fits and has a step below ``limit`` us.

    It looks at every pair of an assignment for the weights and one for the activations, and computes the step of those
    whose bytes fit and which are not too slow already without what they cost together: nothing is negative.
    """
    stage = question.stages[0]
    weights, activations = _parts(stage)
    ranks, n = sum(stage.cards), len(stage.blocks)
    threads = question.threads // ranks
    none = np.zeros((1, n, 5), dtype=np.int64)
    at_rest = costs(question, 0, none, np.zeros(1, dtype=np.int64), threads)

    def padded(part: Ints, columns: slice, others: Ints | int = 0) -> Ints:
        whole = np.full((len(part), n, 5), 0, dtype=np.int64)
        whole[:, :, columns] = part
        whole[:, :, 4] |= others
        return whole

    can_again = np.array([block.again is not None for block in stage.blocks], dtype=np.int64)
    both = np.concatenate([weights, weights])
    speculate = np.repeat([0, 1], len(weights))
    of_weights = costs(question, 0, padded(both, slice(0, 3)), speculate, threads)
    # The earlier a gradient is there the shorter is the wait: as early as it may be, everything computed again.
    soonest = costs(question, 0, padded(both, slice(0, 3), can_again), speculate, threads).wait
    of_weights = replace(of_weights, wait=soonest)
    of_activations = replace(
        costs(question, 0, padded(activations, slice(3, 5)), np.zeros(len(activations), dtype=np.int64), threads),
        wait=np.full(len(activations), -(10**12)),
    )
    kept_w = np.flatnonzero(step(question, [of_weights])[0] < limit)
    kept_a = np.flatnonzero(step(question, [of_activations])[0] < limit)
    of_weights = of_weights.of(kept_w)
    for number in kept_a:
        alone = of_activations.of(np.array([number]))
        together = Costs(
            device=of_weights.device + alone.device - at_rest.device,
            host=of_weights.host + alone.host - at_rest.host,
            ends=np.maximum(of_weights.ends, alone.ends),
            period=np.maximum(of_weights.period, alone.period),
            out=of_weights.out + alone.out,
            into=of_weights.into + alone.into,
            wait=of_weights.wait,
        )
        steps, host = step(question, [together])
        near = np.flatnonzero((together.device <= stage.capacity) & (host <= question.memory) & (steps < limit))
        if not len(near):
            continue
        chosen = np.concatenate([both[kept_w[near]], np.repeat(activations[number][None], len(near), 0)], axis=-1)
        found = costs(question, 0, chosen, speculate[kept_w[near]], threads)
        if (step(question, [found])[0] < limit).any():
            return True
    return False


def least_step_of_host(question: Question) -> int | None:
    """Microseconds of the shortest step of several stages, by every choice of each and every division of the threads.

    Of each stage only what no other choice of it beats in everything.
    """
    ranks = [sum(stage.cards) for stage in question.stages]
    best: int | None = None
    kept: dict[tuple[int, int], Costs] = {}
    for threads in itertools.product(range(1, question.threads + 1), repeat=len(ranks)):
        if sum(count * each for count, each in zip(ranks, threads, strict=True)) > question.threads:
            continue
        found = []
        for index, each in enumerate(threads):
            if (index, each) not in kept:
                kept[index, each] = _undominated(question, index, each)
            shape = [1] * len(ranks)
            shape[index] = -1
            of_stage = kept[index, each]
            found.append(Costs(*(getattr(of_stage, name).reshape(shape) for name in of_stage.__dataclass_fields__)))
        steps, host = step(question, found)
        fits = np.broadcast_to(host <= question.memory, steps.shape)
        if fits.any():
            least = int(steps[fits].min())
            best = least if best is None else min(best, least)
    return best


def _undominated(question: Question, index: int, threads: int) -> Costs:
    choices, speculate = every_choice(question.stages[index])
    found = costs(question, index, choices, speculate, threads)
    found = found.of(np.flatnonzero(found.device <= question.stages[index].capacity))
    names = ("host", "ends", "period", "out", "into", "wait")
    rows = np.unique(np.stack([getattr(found, name) for name in names], axis=-1), axis=0)
    best = [
        number
        for number, row in enumerate(rows)
        # They are sorted, so that nothing behind a row beats it.
        if not (rows[:number] <= row).all(-1).any()
    ]
    return Costs(np.zeros(len(best), dtype=np.int64), *rows[best].T)


def random_stage(draw: random.Random, *, blocks: int, cards: tuple[int, ...], alike: bool = False) -> Stage:
    """Unlike blocks, or the layers of a model with an embedding or a head at an end; some of its memory is missing."""
    first, last = draw.random() < 0.4, draw.random() < 0.4
    ways = draw.choice((1, 1, 2, 4))
    layer = _random_block(draw, "block", ways)
    made = []
    for j in range(blocks):
        if first and j == 0 and blocks > 1:
            made.append(_random_block(draw, "embedding", ways))
        elif last and j == blocks - 1 and blocks > 1:
            made.append(_random_block(draw, "head", ways))
        else:
            made.append(layer if alike else _random_block(draw, "block", ways))
    return Stage(
        blocks=tuple(made),
        in_flight=draw.randint(1, 4),
        capacity=0,
        other=draw.randint(0, 100),
        bucket=draw.choice((0, 160)) if ways > 1 else 0,
        cards=cards,
        fill=draw.choice((0, draw.randint(0, 400_000))),
        drain=draw.choice((0, draw.randint(0, 800_000))),
    )


def _random_block(draw: random.Random, kind: ModuleKind, ways: int) -> Block:
    parameters = 4 * (draw.randint(5, 60) if kind == "block" else draw.randint(10, 150))
    forward = draw.randint(2_000, 60_000) if kind == "block" else draw.randint(0, 20_000)
    saved = draw.randint(20, 800) if kind == "block" else draw.randint(0, 400)
    return Block(
        kind=kind,
        parameters=parameters,
        largest=parameters // draw.choice((1, 2, 4)),
        ways=ways,
        saved=saved,
        again=draw.randint(1, 1 + saved // 8) if kind == "block" else None,
        forward=forward,
        backward=2 * forward,
        recompute=forward if kind == "block" else 0,
        update=parameters // ways * draw.choice((5, 20)),
        reads=(1, 0) if kind == "embedding" else (1, 1),
    )


def random_question(draw: random.Random, blocks: Sequence[int], *, alike: bool = False) -> Question:
    """Stages of so many blocks on one host; now and then nothing fits."""
    switches = draw.choice((1, 2)) if len(blocks) > 1 else 1
    stages = []
    for number, count in enumerate(blocks):
        behind = [0] * switches
        behind[number % switches] = draw.choice((1, 1, 2))
        stages.append(random_stage(draw, blocks=count, cards=tuple(behind), alike=alike))
    ranks = sum(sum(stage.cards) for stage in stages)
    into = draw.choice((40, 85, 170))
    question = Question(
        stages=tuple(stages),
        memory=0,
        threads=ranks * draw.choice((1, 2)) + draw.choice((0, 1)) * (len(blocks) > 1),
        out=draw.choice((into, into - 5)),
        into=into,
        latency=draw.choice((0, 10)),
        add=draw.choice((1, 10, 40)),
        update=draw.choice((120, 600, 2400, 6000)),
        microbatches=draw.choice((1, 2, 4, 8, 16)),
        norm=draw.choice((0, 500)),
        rest=draw.randint(0, 10**6),
        rest_period=draw.choice((0, draw.randint(0, 500_000))),
    )
    return _with_memory(draw, question)


def _with_memory(draw: random.Random, question: Question) -> Question:
    """The same with memory that binds: devices hold a part of what they would like to, and so does the host."""
    stages, most = [], 0
    for index, stage in enumerate(question.stages):
        n = len(stage.blocks)
        extremes = np.zeros((3, n, 5), dtype=np.int64)
        extremes[1, :, :3] = extremes[2, :, :4] = 1
        extremes[1, :, 4] = [block.again is not None for block in stage.blocks]
        found = costs(question, index, extremes, np.ones(3, dtype=np.int64), 1)
        whole, least = int(found.device[0]), int(found.device.min())
        stages.append(replace(stage, capacity=least + int((whole - least) * draw.uniform(-0.02, 0.9))))
        most += sum(stage.cards) * int(found.host.max())
    return replace(question, stages=tuple(stages), memory=int(most * draw.choice((0.25, 0.5, 1.0))))


def choice_of(choices: Ints, speculate: Ints, number: int, threads: int) -> OffloadChoice:
    """One of an array of choices, as the planner says it."""
    blocks = tuple(BlockChoice(*map(bool, row)) for row in choices[number])
    return OffloadChoice(blocks=blocks, speculate=bool(speculate[number]), threads=threads)
