"""In which order the turns of a tree may go: who waits for whose completion. Pure."""

from __future__ import annotations

from simulations.trace import Ref, Session, Tree, Turn

__all__ = ["Order"]


class Order:
    """The turns of one tree, released as the completions they wait for come in.

    Of a stepwise session no turn is looked at before the one before it is released.
    """

    def __init__(self, tree: Tree) -> None:
        self._sessions = {session.id: session for session in tree.sessions}
        self._begun_by: dict[Ref, list[Session]] = {}
        """Stepwise sessions, by the turn they begin after."""
        self._pending: dict[Ref, int] = {}
        self._followers: dict[Ref, list[Ref]] = {}
        self._over: set[Ref] = set()
        self._start_s = tree.sessions[0].turns[0].at_s
        for session in tree.sessions:
            if not session.stepwise:
                for number in range(len(session.turns)):
                    self._enter(Ref(session.id, number))
            elif session.parent is None:
                self._enter(Ref(session.id, 0))
            else:
                self._begun_by.setdefault(session.parent, []).append(session)
        self._free = [ref for ref, count in self._pending.items() if not count]
        for ref in self._free:
            self._look_on(ref)

    def begin(self) -> list[Ref]:
        """Turns that wait for nothing."""
        return self._free

    def complete(self, ref: Ref) -> list[Ref]:
        """Turns that waited for this one last of all."""
        self._over.add(ref)
        released = []
        for follower in self._followers.pop(ref, ()):
            self._pending[follower] -= 1
            if not self._pending[follower]:
                released.append(follower)
        for each in released:
            self._look_on(each)
        return released

    def pause_s(self, ref: Ref) -> float:
        """Seconds, on the trace's clock, between a turn's release and its send.

        A later turn that waits for nothing goes when it was recorded to, counted from the tree's first.
        """
        turn = self._turn(ref)
        if not turn.after and turn.at_s is not None and self._start_s is not None:
            return max(turn.at_s - self._start_s, 0.0)
        return turn.think_s or 0.0

    def _turn(self, ref: Ref) -> Turn:
        return self._sessions[ref.session].turns[ref.turn]

    def _exists(self, ref: Ref) -> bool:
        return ref.session in self._sessions and ref.turn < len(self._sessions[ref.session].turns)

    def _enter(self, ref: Ref) -> None:
        awaited = {each for each in self._turn(ref).after if self._exists(each) and each not in self._over}
        self._pending[ref] = len(awaited)
        for each in awaited:
            self._followers.setdefault(each, []).append(ref)

    def _look_on(self, ref: Ref) -> None:
        """Enter the stepwise turns that this released one comes right before."""
        following = Ref(ref.session, ref.turn + 1)
        if self._sessions[ref.session].stepwise and self._exists(following):
            self._enter(following)
        for session in self._begun_by.pop(ref, ()):
            self._enter(Ref(session.id, 0))
