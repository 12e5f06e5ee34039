"""Keeps what was made last under its keys, so that simulations of plans that have parts in common make these once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, at most ``most`` of them: the ones that nobody asked for longest make room.

    A key that names an object by its ``id`` needs a value that keeps this object alive.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, which ``make`` makes if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        if self._most:
            self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value
