"""Runs a launch from one host: starts all torchruns, shows what they say, and ends all as soon as one has failed."""

import collections
import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hetero.errors import ConfigError, MembershipError
from hetero.launch.hosts import NodeHost
from hetero.private_files import open_for_writing
from hetero.signal_handlers import signal_handlers

LAST_LINES = 15
"""Lines of a log that a message repeats."""

END_WITHIN_S = 60.0
"""From the word to end until what is left is killed: torchrun gives its ranks 30 s, and ssh takes some."""

_LAST_WORDS_S = 5.0

INTERRUPTED = 130
"""Exit code of what a signal has ended, as shells have it."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What runs for a host on this machine: its shell, or ssh.

    first_input: what standard input begins with; unlike ``words``, the list of processes does not show it.
    """

    host: NodeHost
    words: tuple[str, ...]
    first_input: bytes = b""


class _Watched:
    """A host's process, and a thread that copies what it says into its log."""

    def __init__(
        self,
        command: HostCommand,
        log: Path,
        *,
        say: Callable[[str], None],
        ended: "queue.SimpleQueue[_Watched | None]",
    ) -> None:
        self.host, self.log = command.host, log
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._say, self._ended = say, ended
        try:
            self._file = open_for_writing(log, "w")
        except OSError as error:
            raise ConfigError(f"{log}: cannot be written: {error.strerror}; name another folder (--logs)") from None
        try:
            self.process = subprocess.Popen(
                command.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A Ctrl-C of the terminal is for this process, which then ends all hosts alike.
                start_new_session=True,
            )
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"host {self.host.title}: {command.words[0]} cannot be started: {error.strerror}"
            ) from None
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()
        self._write(command.first_input)

    def _write(self, content: bytes) -> None:
        assert self.process.stdin is not None
        # One that ends before it reads has said why.
        with contextlib.suppress(OSError):
            self.process.stdin.write(content)
            self.process.stdin.flush()

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with self._file as log:
            for line in self.process.stdout:
                log.write(line)
                # A progress bar goes back to the start of its line again and again.
                for text in line.decode("utf-8", errors="replace").rstrip().splitlines() or [""]:
                    self.last.append(text)
                    self._say(text)
        self.process.wait()
        self._ended.put(self)

    def wait(self) -> None:
        """Until it has ended, which it is made to in the end, and all that it said is in its log."""
        try:
            self.process.wait(timeout=END_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.kill()
            self.process.wait()
        # What it has left behind may hold its output open, and says nothing any more.
        self._thread.join(timeout=_LAST_WORDS_S)

    def tell_to_end(self) -> None:
        """Close its standard input, which its shell watches."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def run_on_hosts(commands: Sequence[HostCommand], *, logs: Path, say: Callable[[str], None]) -> int:
    """Run all hosts to their end.

    Args:
        logs: an existing folder, which gets a file for each host.
        say: takes each line of output, behind the host's name where there are several hosts.

    Returns:
        0, or :data:`INTERRUPTED` if a signal has ended them.

    Raises:
        ConfigError: a process cannot be started.
        MembershipError: a host has failed, after which the others were ended; the message has the last lines of its
            log.
    """
    # None stands for a signal.
    ended: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
    running: list[_Watched] = []
    with _signals_into(ended):
        try:
            for command in commands:
                name = command.host.name
                prefix = f"{name}: " if len(commands) > 1 else ""
                log = logs / f"{name}.log"
                running.append(_Watched(command, log, say=_prefixed(say, prefix), ended=ended))
        except ConfigError:
            _end(running)
            raise
        for _ in commands:
            done = ended.get()
            if done is None:
                _end(running)
                return INTERRUPTED
            if done.process.returncode:
                _end(running)
                raise MembershipError(_message(done, others=len(running) - 1))
    return 0


@contextlib.contextmanager
def _signals_into(ended: "queue.SimpleQueue[_Watched | None]") -> Iterator[None]:
    """Let Ctrl-C and SIGTERM be read from ``ended``: one that interrupted the start of a host would leave it running.

    A second one interrupts, so that nobody has to wait for hosts that do not end.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        for each in numbers:
            signal.signal(each, signal.default_int_handler)
        # This queue's put may be called while its get waits.
        ended.put(None)

    with signal_handlers(numbers, note):
        yield


def _prefixed(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda line: say(prefix + line)


def _end(running: Sequence[_Watched]) -> None:
    for each in running:
        each.tell_to_end()
    for each in running:
        each.wait()


def _message(failed: _Watched, *, others: int) -> str:
    code = failed.process.returncode
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    after = (
        f", after which {'the other was' if others == 1 else f'the {others} others were'} told to end" if others else ""
    )
    said = "\n".join(f"    {line}" for line in failed.last) or "    (nothing)"
    return f"host {failed.host.title} has ended with {how}{after}; the last lines of {failed.log}:\n{said}"
