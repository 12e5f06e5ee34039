"""Marks cases of a parametrized test that the fast run leaves out."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Each as a case that is marked ``slow``; a tuple is the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
