"""A fleet in a few lines, for tests of the decision: it places turns with the real code and applies what was decided.

It knows no I/O and no time but what a test sets; loads, residues and crowds follow the store's contract
(`router.store.memory`), reduced to what one process that never fails would see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from router.domain.decision import Placed, Refused
from router.domain.replica import Beliefs, Capacity, Fleet, Load, Profile, Replica
from router.domain.session import Binding, Boundary, Branch, Residue
from router.domain.turn import Turn
from router.placement.cost import Tuning, branch_weight, crowd_now
from router.placement.decide import decide
from router.placement.lineage import Lineage

CAPACITY = Capacity(device_tokens=750_000)
LONG_AGO_S = 0.0
NOW_S = 1_000_000.0


def replica(number: int, **changes: object) -> Replica:
    """An idle, healthy replica that joined long ago."""
    plain = Replica(
        id=f"r{number}",
        url=f"http://r{number}",
        incarnation="life",
        capacity=CAPACITY,
        joined_at_s=LONG_AGO_S,
        load=Load(crowd_at_s=NOW_S),
        beliefs=Beliefs(),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def fleet(*replicas: Replica, profile: Profile | None = None) -> Fleet:
    """A snapshot of these."""
    return Fleet("test", profile or Profile(), replicas, NOW_S)


def lineage(
    branch: Branch | None, *, session: str = "s", parent: Branch | None = None, shared_bytes: int = 0
) -> Lineage:
    """The lineage of a turn that continues `branch`, or of a new one that shares `shared_bytes` with `parent`."""
    if branch is not None:
        return Lineage(branch.id, branch.session, branch, branch, branch.text_bytes, Boundary("tip", branch.text_bytes))
    return Lineage("new", session, None, parent, shared_bytes, Boundary("tip", shared_bytes))


@dataclass
class World:
    """Replicas by id and branches by id, and what is in flight."""

    replicas: dict[str, Replica]
    tuning: Tuning = field(default_factory=Tuning)
    policy: str = "roost"
    branches: dict[str, Branch] = field(default_factory=dict)
    now_s: float = NOW_S
    turns: int = 0

    @classmethod
    def of(cls, count: int, policy: str = "roost") -> World:
        """`count` equal idle replicas."""
        return cls({f"r{number}": replica(number) for number in range(count)}, policy=policy)

    def snapshot(self) -> Fleet:
        """The fleet now."""
        return Fleet("test", Profile(), tuple(self.replicas.values()), self.now_s)

    def begin(
        self, branch_id: str, prompt_tokens: int, *, shared_with: str | None = None, shared_tokens: int = 0
    ) -> Placed:
        """Place the next turn of a branch (a new one, or a fork sharing a prefix) and count it as in flight."""
        self.turns += 1
        known = self.branches.get(branch_id)
        parent = self.branches.get(shared_with) if shared_with is not None else known
        came_from = Lineage(branch_id, branch_id, known, parent, 0, None)
        turn = Turn(
            id=f"t{self.turns}",
            session=branch_id,
            prompt_tokens=prompt_tokens,
            output_tokens=self.tuning.expected_output_tokens,
            shared_tokens=known.tokens if known is not None else shared_tokens,
            fork=known is None,
            sequence=self.turns,
        )
        placed = decide(turn, came_from, self.snapshot(), self.policy, self.tuning)
        assert not isinstance(placed, Refused), placed.why
        self._commit(branch_id, known, prompt_tokens, placed)
        return placed

    def _commit(self, branch_id: str, known: Branch | None, prompt_tokens: int, placed: Placed) -> None:
        if known is not None and known.home is not None:
            self._share(known.home.replica, -known.weight, known.active_at_s)
        weight = branch_weight(prompt_tokens)
        self._share(placed.binding.replica, weight, self.now_s)
        home = placed.binding
        base = known or Branch(branch_id, branch_id)
        self.branches[branch_id] = replace(
            base, home=home, weight=weight, active_at_s=self.now_s, in_flight=base.in_flight + 1, turns=base.turns + 1
        )
        here = self.replicas[placed.replica]
        load = replace(
            here.load,
            in_flight=here.load.in_flight + 1,
            prefill_tokens=here.load.prefill_tokens + placed.prefill_tokens,
        )
        self.replicas[placed.replica] = replace(here, load=load)

    def _share(self, replica_id: str, weight: float, since_s: float) -> None:
        here = self.replicas.get(replica_id)
        if here is None:
            return
        half = self.tuning.crowd_half_life_s
        decayed = weight * 2.0 ** (-(self.now_s - since_s) / half)
        crowd = max(0.0, crowd_now(here.load, self.now_s, half) + decayed)
        self.replicas[replica_id] = replace(here, load=replace(here.load, crowd=crowd, crowd_at_s=self.now_s))

    def finish(self, branch_id: str, placed: Placed, prompt_tokens: int, output_tokens: int = 440) -> None:
        """Settle a turn: its KV is resident where it ran."""
        here = self.replicas[placed.replica]
        admitted = here.load.admitted_tokens + placed.prefill_tokens + output_tokens
        load = replace(
            here.load,
            in_flight=here.load.in_flight - 1,
            prefill_tokens=here.load.prefill_tokens - placed.prefill_tokens,
            admitted_tokens=admitted,
        )
        self.replicas[placed.replica] = replace(here, load=load)
        branch = self.branches[branch_id]
        left = Residue(placed.replica, placed.incarnation, prompt_tokens + output_tokens, admitted)
        others = tuple(residue for residue in branch.residues if residue.replica != placed.replica)
        self.branches[branch_id] = replace(
            branch, in_flight=branch.in_flight - 1, tokens=prompt_tokens, residues=(left, *others)
        )

    def turn(self, branch_id: str, prompt_tokens: int) -> Placed:
        """A whole turn."""
        placed = self.begin(branch_id, prompt_tokens)
        self.finish(branch_id, placed, prompt_tokens)
        return placed

    def homes(self) -> dict[str, int]:
        """How many branches live at each replica."""
        counts = dict.fromkeys(self.replicas, 0)
        for branch in self.branches.values():
            if branch.home is not None and branch.home.replica in counts:
                counts[branch.home.replica] += 1
        return counts


def at(replica_id: str) -> Binding:
    """A binding to a replica's present life."""
    return Binding(replica_id, "life")
