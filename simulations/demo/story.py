"""When what happens, and what the caption says of it. Pure.

The caption is one line that says what is happening and why, made of what was counted: it claims nothing that is not so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from simulations.demo.programme import Compared
from simulations.demo.tally import AWAY, FIRST, Spread

__all__ = ["CAPTION_CHARS", "LONG", "SHORT", "Act", "Acts", "Scene", "caption"]

CAPTION_CHARS: Final = 96
"""What one line on the screen holds."""


class Act(Enum):
    """A part of the story; the value is its title."""

    ARRIVE = "1 of 4: sessions arrive, and stick"
    FAN_OUT = "2 of 4: a session starts subagents"
    JOIN = "3 of 4: more agents come, and a fifth replica"
    COMPARE = "4 of 4: the same sessions under other policies"
    ENCORE = "the story is told; traffic goes on until Ctrl-C"


@dataclass(frozen=True, slots=True)
class Acts:
    """Wall seconds of the acts that are played live."""

    arrive_s: float
    fan_out_s: float
    join_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.arrive_s + self.fan_out_s + self.join_s


LONG: Final = Acts(arrive_s=14.0, fan_out_s=18.0, join_s=24.0)
"""For someone who watches."""
SHORT: Final = Acts(arrive_s=8.0, fan_out_s=10.0, join_s=12.0)
"""For `--once`: within a minute on two busy cores, start and comparison included."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What the caption may speak of."""

    act: Act
    sessions: int = 0
    """That have come so far."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    spread: Spread | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What replicas are called."""
    newcomer: str | None = None
    new_sessions: int = 0
    """Since the join."""
    newcomer_sessions: int = 0
    newcomer_of_first: int = 0
    """Of the first `FIRST` of them."""
    old_branches: int = 0
    moved_by_join: int = 0
    compared: Sequence[Compared] = ()
    """So far."""
    policies: int = 0


def caption(scene: Scene) -> str:
    """One line."""
    return _SAYS[scene.act](scene)


def _arrive(scene: Scene) -> str:
    if not scene.sessions:
        return "Four simulated replicas are up. The first sessions are about to send their first turns."
    home, away = scene.reasons.get("home", 0), sum(scene.reasons.get(why, 0) for why in AWAY)
    if not home + away:
        return f"{scene.sessions} sessions came; each new one goes where it costs the fewest seconds."
    return f"{scene.sessions} sessions came. {home} of their {home + away} later turns went home, to where their KV is."


def _fan_out(scene: Scene) -> str:
    spread = scene.spread
    if spread is None:
        return "The next session to begin will start subagents, all at once."
    if sum(spread.began.values()) < 2:
        return f"{spread.session} begins; after its first turn it starts {spread.agents} subagents at once."
    where = " ".join(f"{count}@{scene.names.get(name, name)}" for name, count in spread.began.items())
    line = f"{spread.session}'s {spread.agents} subagents spread ({where})"
    if not spread.later_turns:
        return f"{line}: all on one replica would be slower."
    return f"{line}; {spread.stayed} of {spread.later_turns} later turns stayed with their own KV."


def _join(scene: Scene) -> str:
    name = scene.newcomer
    if name is None:
        return "A fifth replica starts and is added through the admin API."
    moved = f"{scene.moved_by_join} of {scene.old_branches} old branches moved there"
    if not scene.new_sessions:
        return f"{name} has joined, empty. {moved}: their KV is where they are."
    if scene.new_sessions <= FIRST:
        got = f"{scene.newcomer_sessions} of {scene.new_sessions} new sessions"
        return f"{name} joined, empty, and took {got}; {moved}."
    got = f"{scene.newcomer_of_first} of the first {FIRST} new sessions"
    return f"{name} took {got}, {scene.newcomer_sessions} of {scene.new_sessions} in all; {moved}."


def _compare(scene: Scene) -> str:
    if len(scene.compared) < scene.policies:
        played = f"{len(scene.compared)} of {scene.policies} policies played"
        return f"The same sessions in virtual time, by the router's own code: {played} so far."
    means = ", ".join(f"{each.policy} {each.ttft_mean_s:.2f} s" for each in scene.compared)
    return f"In virtual time, mean TTFT: {means}."


def _encore(scene: Scene) -> str:
    del scene
    return "Send it a turn yourself, or look at /admin/decisions. Ctrl-C ends it and leaves nothing behind."


_SAYS: Final = {
    Act.ARRIVE: _arrive,
    Act.FAN_OUT: _fan_out,
    Act.JOIN: _join,
    Act.COMPARE: _compare,
    Act.ENCORE: _encore,
}
