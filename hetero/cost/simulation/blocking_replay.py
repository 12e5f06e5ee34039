"""Replays for runtimes whose transfers block: sender and receiver meet, and both stand still until the last byte.

Our own runtime never does that; DeepSpeed's pipeline engine (:mod:`hetero.cost.other_runtimes.deepspeed`) and
Megatron-LM (:mod:`hetero.cost.other_runtimes.megatron_lm`) do.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from hetero.cost.simulation.engine import Lane, Replay


class BlockingReplay(Replay):
    """As :class:`~hetero.cost.simulation.engine.Replay`, but every SEND and RECV blocks its lane, one by one."""

    def _run(self, lanes: Sequence[Lane]) -> None:
        """Events are the moments at which a lane may go on."""
        events = [(lane.clock_s, i, lane) for i, lane in enumerate(lanes)]
        created = len(events)
        # By lane, how many of its current posts have met, or wait for, the other side.
        num_met = dict.fromkeys(lanes, 0)
        waiting: dict[int, Lane] = {}
        while events:
            now_s, _, lane = heappop(events)
            posts = lane.posts[lane.position]
            if num_met[lane] < len(posts):
                n = posts[num_met[lane]]
                num_met[lane] += 1
                other = waiting.pop(n, None)
                if other is None:
                    waiting[n] = lane
                    continue
                self._start(n, now_s, lane.last)
                for each in self._sender_first(n, lane, other):
                    created += 1
                    each.last = n
                    heappush(events, (self.end_s[n], created, each))
            elif lane.position < len(lane.computes):
                num_met[lane], lane.clock_s = 0, now_s
                created += 1
                heappush(events, (self._compute(lane), created, lane))

    def _sender_first(self, n: int, one: Lane, other: Lane) -> tuple[Lane, Lane]:
        series = self._series_of[n]
        return (one, other) if series is not None and one.computes[0].stage == series.stage else (other, one)


class BatchedReplay(Replay):
    """As :class:`~hetero.cost.simulation.engine.Replay`, but between two computes a lane stands still until all that it
    posts there has arrived: each transfer starts when the other side has posted it too."""

    def _run(self, lanes: Sequence[Lane]) -> None:
        """Events are the moments at which a lane posts what lies between two computes."""
        events = [(lane.clock_s, i, lane) for i, lane in enumerate(lanes)]
        created = len(events)
        waiting: dict[int, Lane] = {}
        while events:
            now_s, _, lane = heappop(events)
            posts = lane.posts[lane.position]
            lane.clock_s, lane.missing = now_s, len(posts)
            met = [] if posts else [lane]
            for n in posts:
                other = waiting.pop(n, None)
                if other is None:
                    waiting[n] = lane
                    continue
                self._start(n, now_s, lane.last)
                for each in (lane, other):
                    each.missing -= 1
                    if not each.missing:
                        met.append(each)
            for each in met:
                if each.position < len(each.computes):
                    self._wait(each)
                    created += 1
                    heappush(events, (self._compute(each), created, each))

    def _wait(self, lane: Lane) -> None:
        """Let a lane stand still until the last of its current transfers has ended."""
        for n in lane.posts[lane.position]:
            if self.end_s[n] > lane.clock_s:
                lane.clock_s, lane.last = self.end_s[n], n
