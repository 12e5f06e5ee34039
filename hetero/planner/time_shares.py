"""Shares out the time for one question: every step of planning, with its part of what is left when it begins.

The passes over finished plans have their shares in :mod:`hetero.planner.improve.passes`. All shares are heuristics,
found by trying on the clusters of ``tests/bench/bench_planner.py``.
"""

from enum import Enum

from hetero.planner.deadline import Deadline


class TimeShare(Enum):
    """A step of planning, in their order: its share of the time that is left, and what that is for."""

    PLANNING = 0.93, "of the time limit, all of planning; a step that has begun then is finished first"
    GOING_ON = 0.03, "of a rung, the search among whole plans of the rung before: it gains where the limit is near"
    LATER_GOING_ON = 0.1, "the same in later rungs than the third, where construction seldom finds better plans"
    INITIAL_PLAN = 0.08, "the initial plan; where nothing is found by then, until something is"
    INITIAL_TEMPLATES = 0.4, "of the initial plan's share, pipelines on one node type"
    FIRST_PIPELINE = 0.5, "at most, until one pipeline on one node type fits"
    PUBLISHED_SHAPES = 0.12, "the shapes of two published planners, as initial plans too"
    HARP = 0.6, "of the published shapes' share, those of HARP; the rest is for those of AutoHet"
    PUBLISHED_RESIDENCY = 0.05, "where memory is short, plans by the rules of systems that leave something to hosts"
    COVERS = 0.25, "templates, covers and plans of the best ones; the passes over finished plans have the rest"
    LATER_COVERS = 0.06, "the same in later rungs than the third, where plans of covers are there to be improved"
    KEPT_NODE_TYPES = 0.15, "where the best plan leaves node types idle: covers of those that it keeps"
    LATER_KEPT_NODE_TYPES = 0.03, "the same in later rungs than the third"
    TEMPLATES = 0.5, "stage options and the template space"
    SEARCH = 0.75, "the search for covers with its proof"
    HILL_CLIMBING = 0.4, "hill climbing from the best covers"
    SHORTLIST = 0.5, "plans of the best covers, scored by the simulator, with domains for their gradient sums"
    INITIAL_DOMAINS = 0.1, "of what is left then, domains for the gradient sums of the initial plan"
    RINGS = 0.05, "where nobody has measured how many interfaces a ring gets: the choice of a plan that suits either"
    LEVELLED_SEARCH = 0.9, "of what levelling leaves of the pass by half layers, the local search from the best plan"
    LISTING = 0.5, "of any search among listed plans, listing them; the rest simulates the best by the formula"

    def __init__(self, share: float, purpose: str) -> None:
        self.share = share
        self.purpose = purpose

    def of_seconds(self, seconds: float) -> Deadline:
        """A deadline of this share of so many seconds, from now on."""
        return Deadline(self.share * seconds)

    def of(self, deadline: Deadline) -> Deadline:
        """This share of what is left of ``deadline``."""
        return deadline.part(self.share)
