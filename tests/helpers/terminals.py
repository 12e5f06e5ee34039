"""Commands at terminals of their own, on hosts of tests."""

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.namespaced_hosts import NamespacedHost


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def said(self) -> str:
        """What stands in the terminal by now."""
        return self._output.read_text(errors="replace")

    def type(self, text: str) -> None:
        """Press keys; ``\\x03`` is Ctrl-C."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def press_ctrl_c(self) -> None:
        self.type("\x03")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """Return the exit status of the command once it has ended; tests have a time limit."""
        return self._process.wait()


@contextmanager
def opened_terminal(
    host: NamespacedHost, words: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[Terminal]:
    """Run a command in ``folder`` on a host, at a terminal that is hung up at the end."""
    # The terminal is made there, so that its keys reach what runs on that host alone.
    script = ["script", "--quiet", "--flush", "--return", "--command", shlex.join(words), "/dev/null"]
    with (output := folder / "terminal.out").open("wb") as file:
        process = subprocess.Popen(
            host.command(script, folder=folder), env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file
        )
    try:
        yield Terminal(process, output)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
