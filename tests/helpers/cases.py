"""Marks cases of a parametrized test that the fast run leaves out."""

from typing import Any

import pytest


def slow(*cases: Any, rotates: str | None = None) -> list[Any]:
    """Each as a case that is marked ``slow``; a tuple is the values of several parameters.

    Args:
        rotates: the row that they are, where they take turns.
    """
    marks = [pytest.mark.slow, *([] if rotates is None else [pytest.mark.rotates(rotates)])]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]
