"""Prints which packages of the extra ``test-gpu`` an environment lacks; exit code 1 if there are some.

    python -m tests.gpu_stages.missing_packages

Where no package index can be asked, a folder of wheels may lack one that is imported only in the middle of a run.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    sys.exit("missing: packaging, which reads the names of all others")

PROJECT = "megatron-hetero[test-gpu]"

PROVIDED = ("torch",)
"""Packages whose own requirements are not looked at: who brings them has decided what they need."""


def missing_packages(wanted: str) -> Iterator[str]:
    """Yield the requirements of ``wanted`` that this environment does not meet: names, with versions."""
    waiting, seen = [Requirement(wanted)], set[str]()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name}{requirement.specifier}"
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}, and version {found.version} is there"
        if requirement.name in PROVIDED:
            continue
        extras = requirement.extras or {""}
        needed = map(Requirement, found.requires or ())
        waiting += [
            each for each in needed if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)
        ]


def main() -> int:
    """Print a line for each package that is missing."""
    missing = sorted(missing_packages(PROJECT))
    print("".join(f"missing: {each}\n" for each in missing), end="", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
