"""The Python files of this repository."""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted(path for folder in ("hetero", "megatron", "tools", "examples") for path in (ROOT / folder).rglob("*.py")),
    ROOT / "pretrain_gpt.py",
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    """From the top of the repository."""
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    """What the file says, read once: there are many rules, and each looks at every file."""
    return path.read_text(encoding="utf-8")


def with_words(paths: Iterable[Path], *words: str) -> Iterator[Path]:
    """Those that have one of the words somewhere. To look for them takes a hundredth of the time of parsing."""
    return (path for path in paths if any(word in text(path) for word in words))
