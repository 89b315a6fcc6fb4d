"""The replica model's invariants over random lives, and its prefix cache against a plain one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.replica_model import (
    Aborted,
    Event,
    Failed,
    Finished,
    FirstToken,
    Refused,
    ReplicaModel,
    ReplicaProfile,
    Request,
    Retracted,
    Started,
    chained,
)
from simulations.replica_model.prefix_cache import Node, PrefixCache

PAGE = 4
LAST = (Finished, Aborted, Refused, Failed)


def keys(*blocks: int) -> array[int]:
    """Chained keys of pages with these identities."""
    found, key = array("Q"), 0
    for block in blocks:
        key = chained(key, block)
        found.append(key)
    return found


profiles = st.builds(
    ReplicaProfile,
    name=st.just("tiny"),
    model=st.just("m"),
    page_tokens=st.just(PAGE),
    device_tokens=st.integers(6, 40).map(lambda pages: pages * PAGE),
    host_tokens=st.sampled_from([0, 5 * PAGE, 30 * PAGE, 200 * PAGE]),
    context_tokens=st.just(10_000),
    max_running=st.integers(1, 5),
    max_queued=st.sampled_from([None, 1, 3]),
    priority_scheduling=st.booleans(),
    chunk_tokens=st.sampled_from([PAGE, 3 * PAGE, 20 * PAGE]),
    decode_steps_between_prefills=st.sampled_from([0, 2]),
    prefill_tokens_per_s=st.just(1000.0),
    prefill_depth_tokens=st.just(50.0),
    prefill_base_s=st.sampled_from([0.0, 0.01]),
    decode_base_s=st.just(0.01),
    decode_per_sequence_s=st.just(0.001),
    decode_per_kv_token_s=st.just(0.0001),
    accept_length=st.sampled_from([1.0, 2.7]),
    accept_spread=st.sampled_from([0.0, 0.3]),
    host_load_tokens_per_s=st.just(5000.0),
)


@dataclass(frozen=True)
class Step:
    """Something done to a replica, `after_s` after what was done before."""

    after_s: float
    conversation: int
    depth: int
    """Pages of the conversation's history that this turn keeps."""
    new: int
    """Pages it adds."""
    tail: int
    """Prompt tokens that fill no page."""
    output: int
    allowed: int
    priority: int
    abort: bool


steps = st.builds(
    Step,
    after_s=st.sampled_from([0.0, 0.001, 0.05, 1.0, 20.0]),
    conversation=st.integers(0, 3),
    depth=st.integers(0, 12),
    new=st.integers(0, 8),
    tail=st.integers(1, PAGE - 1),
    output=st.integers(1, 30),
    allowed=st.sampled_from([1, 10, 100]),
    priority=st.integers(0, 2),
    abort=st.sampled_from([False] * 6 + [True]),
)


@dataclass
class Life:
    """A replica and what was done to it."""

    model: ReplicaModel
    now_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    blocks: int = 0

    def do(self, step: Step) -> None:
        self.now_s += step.after_s
        if step.abort:
            self.model.abort(self.now_s, f"{step.conversation}.")
        else:
            kept = self.history.get(step.conversation, [])[: step.depth]
            added = list(range(self.blocks, self.blocks + step.new + 8))
            self.blocks += len(added)
            prompt = len(kept) * PAGE + step.new * PAGE + step.tail
            history = [*kept, *added]
            self.history[step.conversation] = history[: (prompt + step.output) // PAGE]
            rid = f"{step.conversation}.{len(self.requests)}"
            request = Request(rid, keys(*history), prompt, step.output, max(step.allowed, step.output), step.priority)
            self.requests[rid] = request
            self.model.submit(self.now_s, request)
        self.look()

    def look(self) -> None:
        self.events += self.model.advance(self.now_s)
        check(self.model, self.now_s)
        assert isfinite(self.model.next_event_s()) == bool(self.open)

    def run_out(self) -> None:
        """Until nothing happens any more."""
        while (at_s := self.model.next_event_s()) < inf:
            self.now_s = max(self.now_s, at_s)
            self.look()

    @property
    def open(self) -> set[str]:
        return self.requests.keys() - {event.rid for event in self.events if isinstance(event, LAST)}


def check(model: ReplicaModel, now_s: float) -> None:
    """What holds of a replica at every instant."""
    seen = model.snapshot(now_s)
    used = seen.locked_tokens + seen.held_tokens + seen.evictable_tokens
    assert used + seen.free_tokens == model.profile.device_tokens
    assert min(seen.free_tokens, seen.held_tokens, seen.locked_tokens, seen.evictable_tokens, seen.running) >= 0
    assert seen.host_tokens <= model.profile.host_tokens
    assert seen.running <= model.profile.max_running
    check_tree(model._memory.cache)
    if not seen.running:
        assert seen.locked_tokens == seen.held_tokens == 0


def check_tree(cache: PrefixCache) -> None:
    """The tree is well-formed, its sums are right, and both tiers are prefix-closed."""
    device = host = pinned = 0
    for node in cache:
        parent = node.parent
        assert parent is not None
        assert node.keys
        assert parent.children[node.keys[0]] is node
        assert node.start == parent.end
        assert node.end - node.start == len(node.keys) == max(node.device, node.host)
        assert all(node.start < cut < node.end for cut in node.cuts)
        assert node.cuts == sorted(set(node.cuts))
        if node.device and parent.parent:
            assert parent.device == len(parent.keys)
        if node.host and parent.parent:
            assert parent.host == len(parent.keys)
        assert node.device_children == sum(child.device > 0 for child in node.children.values())
        assert node.pins >= sum(child.pins > 0 for child in node.children.values())
        device, host = device + node.device, host + node.host
        pinned += node.device if node.pins else 0
    assert (device, host, pinned) == (cache.device_pages, cache.host_pages, cache.pinned_pages)


def lived(profile: ReplicaProfile, script: Sequence[Step], seed: int = 0) -> Life:
    life = Life(ReplicaModel(profile, seed))
    for step in script:
        life.do(step)
    life.run_out()
    return life


@given(profiles, st.lists(steps, max_size=25))
@settings(max_examples=150, deadline=None)
def test_every_turn_ends_once_and_memory_is_never_overrun(profile: ReplicaProfile, script: list[Step]) -> None:
    """Whatever is done: KV fits at every instant, each turn ends exactly once, and an idle replica holds nothing."""
    life = lived(profile, script)
    ends = Counter(event.rid for event in life.events if isinstance(event, LAST))
    assert ends == dict.fromkeys(life.requests, 1)
    seen = life.model.snapshot(life.now_s)
    assert (seen.running, seen.waiting, seen.locked_tokens, seen.held_tokens) == (0, 0, 0, 0)


@given(profiles, st.lists(steps, max_size=25))
@settings(max_examples=100, deadline=None)
def test_events_come_in_order_and_tell_the_truth(profile: ReplicaProfile, script: list[Step]) -> None:
    """Time never goes back; a turn starts, says its first token, and ends; cached tokens are whole pages."""
    life = lived(profile, script)
    assert [event.at_s for event in life.events] == sorted(event.at_s for event in life.events)
    for rid, request in life.requests.items():
        mine = [event for event in life.events if event.rid == rid]
        kinds = [type(event) for event in mine if not isinstance(event, Retracted)]
        assert kinds[-1] in LAST
        assert kinds[:-1] == [Started, FirstToken][: len(kinds) - 1]
        end = mine[-1]
        if isinstance(end, Finished):
            cached = end.device_tokens + end.host_tokens
            assert kinds == [Started, FirstToken, Finished]
            assert cached < request.prompt_tokens == end.prompt_tokens
            assert cached % PAGE == 0
            assert 1 <= end.output_tokens <= request.output_tokens
            assert end.retractions == sum(isinstance(event, Retracted) for event in mine)
            assert end.host_tokens == 0 or profile.host_tokens


@given(profiles, st.lists(steps, max_size=25))
@settings(max_examples=100, deadline=None)
def test_work_is_conserved(profile: ReplicaProfile, script: list[Step]) -> None:
    """What was not cached was computed, once where nothing was retracted or aborted; busy time fits into the life."""
    life = lived(profile, script)
    counters = life.model.snapshot(life.now_s).counters
    done = [event for event in life.events if isinstance(event, Finished)]
    aborted = [event for event in life.events if isinstance(event, Aborted | Failed)]
    computed = sum(event.prompt_tokens - event.device_tokens - event.host_tokens for event in done)
    assert counters.prefilled_tokens >= computed
    if not aborted and not counters.retractions:
        assert counters.prefilled_tokens == computed
    said = sum(event.output_tokens for event in (*done, *aborted))
    assert counters.output_tokens == said
    assert 0 <= counters.prefill_busy_s <= life.now_s + 1e-9


@given(profiles, st.lists(steps, max_size=15), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_the_same_seed_gives_the_same_life(profile: ReplicaProfile, script: list[Step], seed: int) -> None:
    """Events are a function of profile, seed and what was submitted."""
    assert lived(profile, script, seed).events == lived(profile, script, seed).events


@given(profiles, st.lists(steps, max_size=15), st.lists(st.floats(0, 40), max_size=30))
@settings(max_examples=100, deadline=None)
def test_looking_changes_nothing(profile: ReplicaProfile, script: list[Step], looks: list[float]) -> None:
    """A caller that advances, takes snapshots and asks for progress all the time gets the same events."""
    quiet, watched = Life(ReplicaModel(profile)), Life(ReplicaModel(profile))
    for step in script:
        quiet.do(step)
        until_s = watched.now_s + step.after_s
        for look_s in sorted(at_s for at_s in looks if watched.now_s < at_s < until_s):
            watched.events += watched.model.advance(look_s)
            watched.model.progress(look_s)
            watched.model.snapshot(look_s)
            assert watched.model.next_step_s(look_s) > look_s
        watched.do(step)
    quiet.run_out()
    watched.run_out()
    assert quiet.events == watched.events


# --- the cache against a plain one ---------------------------------------------------------------------------------


class Plain:
    """SGLang's radix tree said plainly: a node per insertion, every node of a path stamped, whole leaves evicted."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, int]] = {}
        """Key of a node's last page: (depth of its start, depth of its end)."""
        self.path: dict[int, tuple[int, ...]] = {}
        """Key of a node's last page: all keys up to there."""
        self.used: dict[int, float] = {}

    @property
    def pages(self) -> int:
        return sum(end - start for start, end in self.nodes.values())

    def match(self, keys: Sequence[int]) -> int:
        held = {key for last, (start, end) in self.nodes.items() for key in self.path[last][start:end]}
        return next((index for index, key in enumerate(keys) if key not in held), len(keys))

    def touch(self, keys: Sequence[int], pages: int, now_s: float) -> None:
        """Split where `pages` ends inside a node, and stamp the path."""
        for last, (start, end) in list(self.nodes.items()):
            shared = sum(a == b for a, b in zip(self.path[last], keys[:pages], strict=False))
            if start < shared < end:
                upper = self.path[last][shared - 1]
                self.nodes[upper], self.path[upper] = (start, shared), self.path[last][:shared]
                self.used[upper] = self.used[last]
                self.nodes[last] = (shared, end)
        for key in keys[:pages]:
            if key in self.nodes:
                self.used[key] = now_s

    def insert(self, keys: Sequence[int], pages: int, now_s: float) -> None:
        known = min(self.match(keys), pages)
        self.touch(keys, known, now_s)
        if known < pages:
            last = keys[pages - 1]
            self.nodes[last], self.path[last], self.used[last] = (known, pages), tuple(keys[:pages]), now_s

    def evict(self, pages: int, pinned: set[int]) -> None:
        freed = 0
        while freed < pages:
            parents = {self.path[last][start - 1] for last, (start, _) in self.nodes.items() if start}
            leaves = [last for last in self.nodes if last not in parents and last not in pinned]
            if not leaves:
                return
            oldest = min(leaves, key=lambda last: self.used[last])
            freed += self.nodes[oldest][1] - self.nodes[oldest][0]
            del self.nodes[oldest], self.path[oldest], self.used[oldest]


blocks = st.lists(st.integers(0, 2), min_size=1, max_size=12)
operations = st.one_of(
    st.tuples(st.just("turn"), blocks, st.integers(0, 12)),
    st.tuples(st.just("hold"), blocks, st.integers(0, 12)),
    st.tuples(st.just("let go"), blocks, st.integers(0, 12)),
    st.tuples(st.just("evict"), blocks, st.integers(1, 12)),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_cache_keeps_what_a_plain_radix_tree_keeps(script: list[tuple[str, list[int], int]]) -> None:
    """Whatever comes: the same pages are there, and the same go, the least recently used leaves first.

    A turn that is held pins its prefix: none of it goes while it is.
    """
    cache, plain = PrefixCache(), Plain()
    held: list[tuple[Node, array[int]]] = []
    asked: list[array[int]] = []
    for now_s, (what, path, number) in enumerate(script, start=1):
        chain = keys(*path)
        asked.append(chain)
        if what in {"turn", "hold"}:
            found = cache.match(chain, min(number, len(chain)))[0]
            tip = cache.pin(chain, found, now_s)
            plain.touch(chain, found, now_s)
            tip = cache.insert(tip, chain, len(chain), now_s)
            plain.insert(chain, len(chain), now_s)
            if what == "turn":
                cache.release(tip, now_s)
            else:
                held.append((tip, chain))
        elif what == "let go" and held:
            tip, chain = held.pop(number % len(held))
            cache.release(tip, now_s)
            plain.touch(chain, len(chain), now_s)
        elif what == "evict":
            before = cache.device_pages
            freed = cache.evict(number)
            assert before - cache.device_pages == freed
            plain.evict(number, {last for _, chain in held for last in chain})
        check_tree(cache)
        assert cache.device_pages == plain.pages
        for chain in asked:
            assert cache.match(chain, len(chain))[0] == plain.match(chain)
        for _, chain in held:
            assert cache.match(chain, len(chain))[0] == len(chain)
