"""Faults of where the ranks' sockets listen, and until when."""

from tests.planted_faults.fault import Fault

RENDEZVOUS_FAULTS = (
    Fault(
        name="the ranks' store listens on all addresses",
        kind="missing check",
        file="hetero/distributed/rendezvous_store.py",
        find="return ServedStore(listening_socket(reachable[0], port), timeout=timeout)",
        replace='return ServedStore(listening_socket("0.0.0.0", port), timeout=timeout)',
        hints=("tests/unit/distributed/test_rendezvous_store.py",),
    ),
    Fault(
        name="the ranks' store takes strangers while they train",
        kind="missing check",
        file="hetero/distributed/rendezvous_store.py",
        find="                close_to_newcomers(self._descriptor)\n",
        replace="",
        hints=("tests/unit/distributed/test_rendezvous_store.py",),
    ),
    Fault(
        name="ranks that are started once more find the store closed",
        kind="dropped message",
        file="hetero/distributed/rendezvous_store.py",
        find="        open_to_newcomers(self._descriptor)\n",
        replace="",
        hints=("tests/unit/distributed/test_rendezvous_store.py",),
    ),
    Fault(
        name="a group of gloo takes strangers",
        kind="missing check",
        file="hetero/distributed/closed_listeners.py",
        find="if inode not in before:",
        replace="if inode in before:",
        hints=("tests/unit/distributed/test_closed_listeners.py", "tests/dist/test_process_groups.py"),
    ),
    Fault(
        name="rank 0 does not say that all are connected",
        kind="dropped message",
        file="hetero/distributed/failure_detector.py",
        find='self._launch_store.set(ALL_CONNECTED, "")',
        replace="pass",
        hints=("tests/unit/distributed/test_failure_detector.py",),
    ),
    Fault(
        name="what a stranger wrote into the store reaches the terminal as it is",
        kind="missing check",
        file="hetero/distributed/failure_detector.py",
        find='return printable(self._read(key).decode(errors="backslashreplace"))',
        replace='return self._read(key).decode(errors="backslashreplace")',
        hints=("tests/unit/distributed/test_failure_detector.py",),
    ),
    Fault(
        name="every host is told another port",
        kind="wrong value",
        file="hetero/launch/torchrun.py",
        find='f"{address}:{self.port}"]',
        replace='f"{address}:{drawn_port()}"]',
        hints=("tests/unit/launch/test_command.py",),
    ),
    Fault(
        name="the port of figures holds any number of connections",
        kind="missing check",
        file="megatron/pretrain/scalar_writers.py",
        find="        _limit_connections(self._server)\n",
        replace="",
        hints=("tests/unit/pretrain/test_metrics.py",),
    ),
)
