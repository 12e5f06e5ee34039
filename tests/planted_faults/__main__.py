"""Shows that the tests still detect: plants faults one at a time, and each makes the suite fail.

python -m tests.planted_faults                     every fault, an hour or two
python -m tests.planted_faults --only gather       those with "gather" in their name
python -m tests.planted_faults --write             and put what was found into docs/planted_faults.md
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from tests.helpers.rotation import rotation_of_today
from tests.planted_faults import table
from tests.planted_faults.catalogue import FAULTS
from tests.planted_faults.fault import Fault
from tests.planted_faults.trial import IN_EVERY_RUN, Verdict, failing, sound_tree, try_fault


def main(argv: Sequence[str]) -> int:
    """Returns 0 if every fault was found."""
    arguments = _parser().parse_args(argv)
    chosen = [fault for fault in FAULTS if not arguments.only or any(part in fault.name for part in arguments.only)]
    if arguments.new:
        chosen = [fault for fault in chosen if table.is_untried(fault)]
    if not chosen:
        print("there is no such fault", file=sys.stderr)
        return 2
    if arguments.list:
        for fault in chosen:
            print(f"{fault.kind}: {fault.name} ({fault.file})")
        return 0
    began_s = time.monotonic()
    options = [IN_EVERY_RUN] if arguments.in_every_run else ["--rotation", str(arguments.rotation)]
    with sound_tree() as sound:
        trials = _trials(chosen, sound, jobs=arguments.jobs, options=options, hints_only=arguments.hints_only)
        verdicts = list(trials)
        found_by = sorted({verdict.found_by for verdict in verdicts if verdict.found_by is not None})
        unsound = failing(sound, found_by, options) if found_by else []
    for test in unsound:
        print(f"{test} fails without any fault, and has found none", file=sys.stderr)
    verdicts = [replace(each, found_by=None) if each.found_by in unsound else each for each in verdicts]
    if arguments.write:
        table.write(verdicts)
    missed = [verdict.fault.name for verdict in verdicts if verdict.found_by is None]
    took_min = (time.monotonic() - began_s) / 60
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} planted faults were found, in {took_min:.0f} min")
    for name in missed:
        print(f"not found: {name}")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="faults with this in their name")
    parser.add_argument("--new", action="store_true", help="those of which the page does not say yet who finds them")
    parser.add_argument("--list", action="store_true", help="list the faults and plant none")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at a time")
    parser.add_argument("--rotation", type=int, default=rotation_of_today(), help="as pytest's own")
    parser.add_argument(IN_EVERY_RUN, action="store_true", help="by what every run has, and no case that rotates")
    parser.add_argument("--hints-only", action="store_true", help="not the whole suite where the hinted tests pass")
    parser.add_argument("--write", action="store_true", help="write what was found into docs/planted_faults.md")
    return parser


def _trials(
    faults: Sequence[Fault], sound: Path, *, jobs: int, options: Sequence[str], hints_only: bool
) -> Iterator[Verdict]:
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        trials = [pool.submit(try_fault, fault, sound, options=options, hints_only=hints_only) for fault in faults]
        for trial in as_completed(trials):
            verdict = trial.result()
            print(table.row(verdict), flush=True)
            yield verdict


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
