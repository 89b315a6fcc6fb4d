"""KV pages of one replica: cached, held by turns in prefill, held by the running batch; and what is promised.

    capacity = cached (pinned + evictable) + held in prefill + held by the running batch + free

Source: SGLang 0.5.23, managers/schedule_policy.py (`PrefillAdder`) and
managers/scheduler_components/new_token_ratio_tracker.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulations.replica_model.prefix_cache import PrefixCache
from simulations.replica_model.seats import RunningBatch, Seat

__all__ = ["Memory", "NewTokenRatio", "reserve_of"]

_CLIP_MAX_TOKENS = 4096
"""SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: what a turn reserves at most."""
_INIT = 0.7
_MIN = 0.7 * 0.14
_DECAY = (_INIT - _MIN) / 600
_RETRACT_STEPS = 20
_TIGHT_STEPS = 64
"""Longest decode segment for which pages are evicted ahead; far ahead would evict what might still be used."""


def reserve_of(max_tokens: int) -> int:
    """What admission promises a turn that may say `max_tokens` more."""
    return min(max_tokens, _CLIP_MAX_TOKENS)


class NewTokenRatio:
    """The share of `max_tokens` that running turns are expected to use: falls with decoding, rises when KV ran out."""

    def __init__(self) -> None:
        self.value = _INIT

    def decay(self, steps: int) -> None:
        """After decode steps without retraction."""
        self.value = max(_MIN, self.value - _DECAY * steps)

    def retracted(self, left: Iterable[Seat], step: int) -> None:
        """After a retraction, by the turns that are left."""
        said = allowed = 0
        for seat in left:
            said += seat.said(step) + _RETRACT_STEPS
            allowed += seat.allowed
        self.value = min(1.0, said / (allowed + 1))


class Memory:
    """The pages of a replica's KV pool. The running batch counts its own."""

    def __init__(self, capacity_pages: int, host_pages: int, page_tokens: int, batch: RunningBatch) -> None:
        self.cache = PrefixCache(host_pages)
        self.prefill_pages = 0
        self.ratio = NewTokenRatio()
        self._capacity = capacity_pages
        self._page = page_tokens
        self._batch = batch

    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self._capacity - self.cache.device_pages - self.prefill_pages - self._batch.held_pages()

    def obtainable_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self._capacity - self.cache.pinned_pages - self.prefill_pages - self._batch.held_pages()

    def make_room(self, pages: int) -> None:
        """Evict until that many pages are free; the caller knows that they can be."""
        short = pages - self.free_pages()
        if short > 0:
            self.cache.evict(short)

    def hold(self, seat: Seat, pages: int) -> None:
        """Let a turn in prefill own that many pages beyond its pinned prefix."""
        more = pages - seat.held_pages
        self.make_room(more)
        self.prefill_pages += more
        seat.held_pages = pages

    def drop(self, seat: Seat) -> None:
        """Take a turn's own pages from it: it ends, or goes where the running batch counts them."""
        self.prefill_pages -= seat.held_pages
        seat.held_pages = 0

    def keep(self, seat: Seat, tokens: int, now_s: float) -> None:
        """Cache the whole pages of a turn's first `tokens`, as far as they have keys."""
        tip = seat.tip
        assert tip is not None
        pages = min(tokens // self._page, len(seat.request.pages))
        if pages > tip.end:
            moved = min(seat.held_pages, pages - tip.end)
            seat.held_pages -= moved
            self.prefill_pages -= moved
            seat.tip = self.cache.insert(tip, seat.request.pages, pages, now_s)

    def admits(self, need_tokens: int, in_pass: Iterable[tuple[Seat, int]]) -> bool:
        """Whether one more turn may be promised `need_tokens`. They are summed only where a bound leaves it open."""
        have = self.obtainable_pages() * self._page
        for seat, _ in in_pass:
            have -= reserve_of(seat.allowed)
        batch, ratio = self._batch, self.ratio.value
        if need_tokens <= have - ratio * batch.reserve_cap:
            return True
        step = batch.step
        left = (reserve_of(max(0, seat.allowed - seat.said(step))) for seat in batch.seats.values())
        return need_tokens <= have - ratio * sum(left)

    def steps_that_fit(self, steps: int) -> int:
        """As many of `steps` as the running batch's KV can grow by, after evicting what it must; 0 if not one."""
        batch, cache = self._batch, self.cache
        while True:
            short = batch.held_pages(steps) + self.prefill_pages + cache.device_pages - self._capacity
            if short <= 0:
                return steps
            if steps > _TIGHT_STEPS:
                steps = _TIGHT_STEPS
                continue
            if cache.evict(short) >= short:
                return steps
            steps //= 2
            if not steps:
                return 0
