"""Sums of gradients in two levels: inside each domain first, and once between the domains.

A domain is a set of ranks with fast links among them, such as a node or a zone. With m the fewest holders that a bucket
has in any of its domains, there are m *rails*: rail i is the i-th holder of every domain. Each rail carries its part of
the bucket across the slow links, so that these see every byte once per domain and not once per holder.
"""

from collections.abc import Sequence

Ranks = tuple[int, ...]


class Domains:
    """The domains of a plan, ready for many questions; without any, every sum is one collective."""

    def __init__(self, domains: Sequence[Ranks]) -> None:
        self._domain_of = {rank: d for d, ranks in enumerate(domains) for rank in ranks}

    def spans(self, ranks: Ranks) -> bool:
        """Whether ``ranks`` lie in two domains at least, so that their sum uses the slow links."""
        return bool(self._domain_of) and len({self._domain_of[rank] for rank in ranks}) > 1

    def parts(self, ranks: Ranks) -> tuple[Ranks, ...]:
        """``ranks``, in ascending order, by domain, the domain of the lowest rank first.

        Empty where two levels are of no use: all ranks lie in one domain, or no two in any.
        """
        if not self.spans(ranks):
            return ()
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._domain_of[rank], []).append(rank)
        return tuple(map(tuple, found.values())) if len(found) < len(ranks) else ()


def rails_of(parts: Sequence[Ranks]) -> tuple[Ranks, ...]:
    """Rail i: the i-th holder of every domain; as many rails as the smallest domain has holders."""
    return tuple(zip(*parts, strict=False))
