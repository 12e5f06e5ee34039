"""Keeps what was made last under its keys, so that simulations of plans that have parts in common make these once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_MISSING: Any = object()


class Recent(Generic[Value]):
    """Values by key, at most ``most`` of them: the ones that nobody asked for longest make room.

    A key that names an object by its ``id`` needs a value that keeps this object alive.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, which ``make`` makes if it is not there."""
        # Keys are large: each look takes as long as to hash all of one.
        value: Value = self._values.pop(key, _MISSING)
        if value is _MISSING:
            value = make()
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value
