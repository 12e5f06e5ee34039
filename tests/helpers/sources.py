"""The Python files of this repository."""

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
