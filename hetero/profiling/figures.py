"""Rounds what was measured."""


def rounded(value: float) -> float:
    """``value`` to four digits: more are not measured."""
    return float(f"{value:.4g}")
