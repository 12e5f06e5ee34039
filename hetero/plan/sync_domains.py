"""Splits gradient groups for hierarchical collectives: inside domains of fast links first, and once between them.

A domain is a set of ranks with fast links among them, such as a node or a zone. With m the fewest ranks that a bucket
has in any of its domains, there are m *rails*: rail i is the i-th rank of every domain. Each rail carries its part of
the bucket across the slow links, so that these carry every byte once per domain and not once per rank. Three ranks in
one domain and two in the other:

    domain 0     rank 0    rank 1    rank 2      1. inside: each domain sums one half onto each of its rails
                   |         |
                 rail 0    rail 1                2. across: the ranks of a rail sum their half
                   |         |
    domain 1     rank 5    rank 6                3. back: each domain gets the halves from its rails

This is the hierarchical all-reduce of arXiv 1807.11205, here with domains of any sizes.
"""

from collections.abc import Sequence

from hetero.plan.ir import Ranks


class Domains:
    """Looks up the domains of ranks; in a plan without domains, every sum is one flat collective."""

    def __init__(self, domains: Sequence[Ranks]) -> None:
        self._domain_of = {rank: d for d, ranks in enumerate(domains) for rank in ranks}

    def spans(self, ranks: Ranks) -> bool:
        """Whether ``ranks`` lie in more than one domain, so that their sum crosses the slow links."""
        return bool(self._domain_of) and len({self._domain_of[rank] for rank in ranks}) > 1

    def parts(self, ranks: Ranks) -> tuple[Ranks, ...]:
        """Groups ``ranks``, given in ascending order, by domain; the domain of the lowest rank comes first.

        Empty where a hierarchical sum is of no use: all ranks lie in one domain, or no two in the same.
        """
        if not self.spans(ranks):
            return ()
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._domain_of[rank], []).append(rank)
        return tuple(map(tuple, found.values())) if len(found) < len(ranks) else ()


def rails_of(parts: Sequence[Ranks]) -> tuple[Ranks, ...]:
    """The rails of a gradient group: rail i is the i-th rank of every domain, as many as the smallest domain has."""
    return tuple(zip(*parts, strict=False))
