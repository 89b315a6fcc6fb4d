"""In which order the turns of a tree may go: who waits for whose completion. Pure."""

from __future__ import annotations

from simulations.trace import Ref, Tree, Turn

__all__ = ["Order"]


class Order:
    """The turns of one tree, released as the completions they wait for come in."""

    def __init__(self, tree: Tree) -> None:
        self._turns = {Ref(session.id, turn.index): turn for session in tree.sessions for turn in session.turns}
        self._pending: dict[Ref, int] = {}
        self._followers: dict[Ref, list[Ref]] = {}
        self._start_s = tree.sessions[0].turns[0].at_s
        for ref, turn in self._turns.items():
            awaited = {each for each in turn.after if each in self._turns}
            self._pending[ref] = len(awaited)
            for each in awaited:
                self._followers.setdefault(each, []).append(ref)

    def begin(self) -> list[Ref]:
        """Turns that wait for nothing."""
        return [ref for ref, count in self._pending.items() if not count]

    def complete(self, ref: Ref) -> list[Ref]:
        """Turns that waited for this one last of all."""
        released = []
        for follower in self._followers.pop(ref, ()):
            self._pending[follower] -= 1
            if not self._pending[follower]:
                released.append(follower)
        return released

    def pause_s(self, ref: Ref) -> float:
        """Seconds, on the trace's clock, between a turn's release and its send.

        A later turn that waits for nothing goes when it was recorded to, counted from the tree's first.
        """
        turn: Turn = self._turns[ref]
        if not turn.after and turn.at_s is not None and self._start_s is not None:
            return max(turn.at_s - self._start_s, 0.0)
        return turn.think_s or 0.0
