"""Emulation is refused where the machine's own speed would be measured."""

import pytest

from hetero.emulation.cluster.real_time_check import check_keeps_up
from hetero.errors import ConfigError


def test_a_machine_with_time_to_sleep_keeps_up() -> None:
    check_keeps_up([(0.9, 2.0), (0.9, 2.0), (0.0, 0.0)], num_cores=2, scale=1.0)


def test_all_ranks_together_need_the_cores() -> None:
    ranks = [(0.5, 2.0)] * 6
    with pytest.raises(ConfigError, match=r"3 processor seconds on 2 cores.*2 s of emulated.*time-scale 1\.6 or more"):
        check_keeps_up(ranks, num_cores=2, scale=1.0)
    check_keeps_up(ranks, num_cores=2, scale=1.6)


def test_each_rank_needs_its_own_time() -> None:
    ranks = [(0.5, 0.8), (0.0, 100.0)]
    with pytest.raises(ConfigError, match=r"time-scale 1\.3 or more"):
        check_keeps_up(ranks, num_cores=64, scale=1.0)
    check_keeps_up(ranks, num_cores=64, scale=1.3)
