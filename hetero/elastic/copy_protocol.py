"""When a rank copies its state, into which slot, and which step is committed. Every rank decides the same.

A rank has two slots for copies. A copy is begun only when the one before is committed or given up, and never in the
slot of the newest committed step. In the all-reduce that every step has, each rank adds 1 if its part of the pending
step is whole: all units that it writes are written, all that it keeps are fetched and verified. If all have, the step
is committed. Whoever has the result knows it; who dies before it arrives has its part whole in a slot all the same, so
that recovery finds the step on the nodes that are left.

As every rank has the same start, interval and sums of votes, all of them begin the same copies and commit the same
steps without another message.
"""

NUM_SLOTS = 2


class CopyProtocol:
    """The slots and votes of one rank in one epoch. Deterministic, without input or output.

    Order of calls within a step: :meth:`vote`, the all-reduce, :meth:`decide`, the update, :meth:`wants_copy`, and
    :meth:`begin` if it does. Before the first step only the last two, for the step that was restored.

    committed: the newest committed step of this epoch, 0 for none.
    pending: the step that is being copied and voted on, ``None`` for none.

    Args:
        start_step: which was restored, 0 for the initial weights; those are never copied, as a seed brings them back.
        world_size: number of ranks that vote.
    """

    def __init__(self, *, start_step: int, world_size: int) -> None:
        self._start_step = start_step
        self._world_size = world_size
        self._slots: list[int | None] = [None] * NUM_SLOTS
        self.committed = 0
        self.pending: int | None = None

    def wants_copy(self, step: int, *, every: int, last: bool) -> bool:
        """Whether the state after ``step`` is to be copied.

        The restored step is, so that it lies on two failure domains again. Later ones are ``every`` steps apart, or
        further where the copy before takes longer. The last step before a planned end always is: it takes the place
        of a pending one, which nobody can know as committed, as this step's votes said that it was not.
        """
        newest = max((held for held in self._slots if held is not None), default=None)
        if step == 0 or newest == step:
            return False
        if last or (newest is None and step == self._start_step):
            return True
        return self.pending is None and step - (self._start_step if newest is None else newest) >= every

    def begin(self, step: int) -> int:
        """Make ``step`` the pending one, and return the slot to overwrite with it."""
        slot = next(slot for slot, held in enumerate(self._slots) if held is None or held != self.committed)
        self._slots[slot] = step
        self.pending = step
        return slot

    def vote(self, whole_step: int | None, *, failed: bool = False) -> float:
        """What this rank adds to the votes: 1 if its part of the pending step is whole, else 0.

        Args:
            whole_step: the newest step of which all units that this rank writes are written, and all that it keeps
                are fetched and verified.
            failed: its part of the pending step will never be whole, as memory is full or the owner's file damaged.
                The vote is then so far below 0 that the sum of all is, whatever the others have.
        """
        if self.pending is None:
            return 0.0
        return -float(self._world_size) if failed else float(whole_step == self.pending)

    def decide(self, votes: float) -> int | None:
        """The step that the sum of all ranks' votes commits, ``None`` for none. The other slot is free then.

        If one failed, the pending step is given up, and its slot is free.
        """
        if self.pending is None:
            return None
        if votes < 0:
            self._slots[self._slots.index(self.pending)] = None
            self.pending = None
        elif round(votes) == self._world_size:
            self.committed, self.pending = self.pending, None
            return self.committed
        return None
