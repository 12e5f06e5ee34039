"""A planted fault: one piece of source text and what stands there instead."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class FaultError(Exception):
    """A fault cannot be planted: the source has changed, and the fault has to follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One wrong piece of source.

    name: what goes wrong, in a few words.
    kind: the sort of mistake, such as ``wrong scale`` or ``dropped message``.
    file: from the root of the repository.
    find: stands in the file exactly once.
    replace: what stands there instead.
    hints: the files whose tests should find it; they run first. Files, since of a test that is named pytest also runs
        the cases whose turn it is not.
    """

    name: str
    kind: str
    file: str
    find: str
    replace: str
    hints: tuple[str, ...]

    def planted(self, root: Path = ROOT) -> str:
        """The text of the file with the fault.

        Raises:
            FaultError: the file is gone, or ``find`` does not stand in it exactly once.
        """
        path = root / self.file
        if not path.is_file():
            raise FaultError(f"{self.name}: there is no {self.file} any more; follow the code to where it went")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise FaultError(
                f"{self.name}: {self.file} has {count} times {self.find!r}, it must be once; follow the code"
            )
        return text.replace(self.find, self.replace)
