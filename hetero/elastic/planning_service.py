"""Plans in processes of its own, so that an agent never stands still: one for who waits, one for what is made ahead."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

from hetero.distributed.helper_processes import end_with_parent
from hetero.elastic.planning_problem import NodeCounts, PlanningProblem
from hetero.elastic.replanning import NewPlan, plan_for, replan
from hetero.errors import PlanError
from hetero.plan.ir import Plan

T = TypeVar("T")

_NICENESS = 19
"""Of plans that nobody waits for: ranks compute on the same cores."""

_END_WITHIN_S = 5.0
"""A process that was killed."""


class PlanningService:
    """Two processes that are forked when they are first needed."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._pools: dict[int, ProcessPoolExecutor] = {}

    async def replan(self, problem: PlanningProblem, *args: Any, **options: Any) -> NewPlan:
        """As :func:`hetero.elastic.replanning.replan`."""
        return await self._run(0, replan, problem, *args, **options)

    async def plan_ahead(self, problem: PlanningProblem, counts: NodeCounts) -> Plan | None:
        """The plan for ``counts``, ``None`` if the model does not fit; gives way to whoever computes."""
        try:
            return await self._run(_NICENESS, plan_for, problem, counts)
        except PlanError:
            return None

    def close(self) -> None:
        """Drop both processes with what they are doing, and the threads that wait for them."""
        for pool in self._pools.values():
            for process in list((pool._processes or {}).values()):
                process.kill()
            # At its exit CPython 3.11 writes into a pipe that such a thread may close at that moment.
            end = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
            end.start()
            end.join(_END_WITHIN_S)
        self._pools = {}

    async def _run(self, niceness: int, function: Callable[..., T], *args: Any, **options: Any) -> T:
        for is_last in (False, True):
            pool = self._pools.get(niceness)
            if pool is None:
                pool = self._pools[niceness] = ProcessPoolExecutor(
                    1, mp_context=self._context, initializer=_begin, initargs=(niceness,)
                )
            try:
                return await asyncio.wrap_future(pool.submit(_call, function, args, options))
            except OSError:
                # Half a pool, for lack of descriptors.
                self._pools.pop(niceness, None)
                raise
            except BrokenExecutor:
                # Somebody has killed it, as the kernel does where memory is short.
                del self._pools[niceness]
                if is_last:
                    raise
        raise AssertionError("the second try is the last")


def _begin(niceness: int) -> None:
    end_with_parent(os.getppid())
    os.nice(niceness)


def _call(function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any]) -> T:
    return function(*args, **options)
