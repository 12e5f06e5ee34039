"""No emulation goes at a pace at which the machine's own speed would be measured."""

import pytest

from hetero.emulation.cluster.real_time_check import kept_time_scale
from hetero.errors import ConfigError


def test_a_machine_with_time_to_sleep_keeps_up() -> None:
    ranks = [(0.9, 2.0), (0.9, 2.0), (0.0, 0.0)]
    assert kept_time_scale(ranks, num_cores=2, asked=1.0) == 1.0
    assert kept_time_scale(ranks, num_cores=2, asked=None) == 1.0


def test_all_ranks_together_need_the_cores() -> None:
    ranks = [(0.5, 2.0)] * 6
    with pytest.raises(ConfigError, match=r"3 processor seconds on 2 cores.*2 s of emulated.*time-scale 1\.6 or more"):
        kept_time_scale(ranks, num_cores=2, asked=1.0)
    assert kept_time_scale(ranks, num_cores=2, asked=1.6) == 1.6


def test_each_rank_needs_its_own_time() -> None:
    ranks = [(0.5, 0.8), (0.0, 100.0)]
    with pytest.raises(ConfigError, match=r"time-scale 1\.3 or more"):
        kept_time_scale(ranks, num_cores=64, asked=1.0)
    assert kept_time_scale(ranks, num_cores=64, asked=1.3) == 1.3


def test_a_slow_machine_chooses_a_pace_that_it_keeps() -> None:
    ranks = [(0.5, 2.0)] * 6
    chosen = kept_time_scale(ranks, num_cores=2, asked=None)
    assert chosen == 1.6
    assert kept_time_scale(ranks, num_cores=2, asked=chosen) == chosen
