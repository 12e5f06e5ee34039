"""How much longer a step takes if what goes to the host is chosen by position, as a plan can say it, and not freely.

python -m tests.bench.bench_offload_choice
python -m tests.bench.bench_offload_choice --stages 50 --blocks 6

Random stages whose devices lack memory, as tests/unit/planner/offload_stages.py draws them: with layers that are all
alike, between an embedding and a head or not, and with blocks of which no two are alike, as no model has them. It also
prints the processor time that CP-SAT takes, and for stages of many alike layers the time by position alone.
"""

import argparse
import random
import statistics
import time

from hetero.planner.deadline import Deadline
from hetero.planner.offload.choose import OffloadAnswer, choose_offload
from tests.unit.planner.offload_stages import Question, random_question

LIMIT_S = 120.0


def timed(question: Question, shape: str) -> tuple[OffloadAnswer, float]:
    began_s = time.process_time()
    answer = choose_offload(question.described(), Deadline(LIMIT_S), shape="free" if shape == "free" else "positions")
    return answer, time.process_time() - began_s


def gaps(num_stages: int, most_blocks: int, *, alike: bool, seed: int) -> None:
    draw = random.Random(seed)
    over: list[float] = []
    seconds: dict[str, list[float]] = {"free": [], "positions": []}
    nothing = only_free = unproven = 0
    for _ in range(num_stages):
        question = random_question(draw, [draw.randint(2, most_blocks)], alike=alike)
        found = {}
        for shape, taken in seconds.items():
            found[shape], process_s = timed(question, shape)
            taken.append(process_s)
        free, by_position = found["free"], found["positions"]
        if "unknown" in (free.verdict, by_position.verdict):
            unproven += 1
        elif free.verdict == "none":
            nothing += 1
        elif by_position.verdict == "none":
            only_free += 1
        else:
            unproven += not (free.proven and by_position.proven)
            over.append(by_position.rounded_step_s / free.rounded_step_s - 1)
    over.sort()
    print(
        f"{'alike layers' if alike else 'unlike blocks'}: {len(over)} of {num_stages} stages fit both ways, "
        f"{only_free} only freely, {nothing} not at all; {unproven} without a proof"
    )
    print(
        f"  by position as short: {sum(each == 0 for each in over)}; longer by {statistics.mean(over):.2%} on average, "
        f"{over[int(0.9 * len(over))]:.2%} in nine of ten, {over[-1]:.1%} at most"
    )
    for shape, taken in seconds.items():
        print(f"  {shape}: {statistics.median(taken) * 1e3:.0f} ms, {max(taken) * 1e3:.0f} ms at most")


def many_layers(seed: int) -> None:
    draw = random.Random(seed)
    for blocks in (16, 32, 48):
        answers = [timed(random_question(draw, [blocks], alike=True), "positions") for _ in range(10)]
        taken = [process_s for _, process_s in answers]
        proven = sum(answer.proven or answer.verdict == "none" for answer, _ in answers)
        print(
            f"{blocks} blocks by position: {proven} of {len(answers)} proven, "
            f"{statistics.median(taken) * 1e3:.0f} ms, {max(taken) * 1e3:.0f} ms at most"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=8, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for alike in (True, False):
        gaps(args.stages, args.blocks, alike=alike, seed=args.seed)
    many_layers(args.seed)


if __name__ == "__main__":
    main()
