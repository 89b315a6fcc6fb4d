"""The replica: a queue, a prefill pass, a running batch, KV pages; events come out when time is told to pass.

Rules
-----
As SGLang 0.5.23's scheduler without overlap: at the end of each phase, finished turns leave; then, if a waiting turn
can be admitted or a prompt is half done, a *prefill pass* runs (at most `chunk_tokens` new tokens, one half-done prompt
at a time), else the running batch *decodes*. Prefill therefore stalls decode, as it does there, unless
`decode_steps_between_prefills` owes the batch some steps after each pass.

- Admission (managers/schedule_policy.py, `PrefillAdder.add_one_req`) is first come, first served, by priority where
  the profile says so. A turn is admitted when its uncached prompt, its clipped `max_tokens` and what running turns are
  still expected to write fit into free plus evictable pages. The expectation is optimistic: a ratio of `max_tokens`
  that starts at 0.7, falls to 0.098 over 600 steps, and rises after a retraction (`NewTokenRatioTracker`).
- A prompt's pages are pinned where they are cached, at most all but its last token; those on the host only are loaded,
  overlapped layer by layer with the pass's computation, so the pass takes the longer of the two.
- Each pass's pages join the cache at once, the output's when the turn ends; the last token said has no KV.
- A decode segment runs until the next turn has said all; an arrival that might be admitted ends it at the next step.
  Where KV cannot grow by a step even after eviction, the turn that has said least is retracted (`retract_decode`): its
  KV is freed, it waits again, and its prefill then covers what it had said. The last turn left fails instead.

Time is the caller's: `submit`, `abort`, `advance` take `now_s`, which never goes back. Nothing here reads a clock,
sleeps or does I/O. Differences between turns (accept lengths) come from a hash of the seed and the turn's id, so the
order of submission does not matter to them.

Not modelled: mixed chunks, the overlap scheduler's one-step delay, LPM and other queue policies, pages that draft
tokens reserve, priority preemption of running turns, prefix matches inside one pass.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from xxhash import xxh3_64_intdigest

from simulations.replica_model.memory import Memory, NewTokenRatio, reserve_of
from simulations.replica_model.seats import MILLI, RunningBatch, Seat
from simulations.replica_model.timing import prefill_s, span_s, steps_until
from simulations.replica_model.values import (
    Aborted,
    Counters,
    Event,
    Failed,
    Finished,
    FirstToken,
    Progress,
    Refused,
    ReplicaProfile,
    Request,
    Retracted,
    Snapshot,
    Started,
)
from simulations.replica_model.waiting import WaitingQueue

__all__ = ["ReplicaModel"]

_LOAD_BACK_TOKENS_MIN = 10
"""UnifiedRadixCache.load_back_threshold: shorter host hits are computed."""
_IDLE, _PREFILL, _DECODE = range(3)


class ReplicaModel:
    """One life of a replica. Not thread-safe; one caller."""

    def __init__(self, profile: ReplicaProfile, seed: int = 0, now_s: float = 0.0) -> None:
        self.profile = profile
        self.seed = seed
        self.counters = Counters()
        self._page = page = profile.page_tokens
        self._batch = RunningBatch(page)
        self._memory = Memory(profile.device_tokens // page, profile.host_tokens // page, page, self._batch)
        self._queue = WaitingQueue(by_priority=profile.priority_scheduling, limit=profile.max_queued)
        self._passing: list[tuple[Seat, int]] = []
        """The prefill pass under way: turns, and the tokens each computes."""
        self._half_done: Seat | None = None
        self._owed_steps = 0
        self._phase = _IDLE
        self._began_s = now_s
        self._ends_s = inf
        self._steps = 0
        """Of the decode segment under way."""
        self._step_s = 0.0
        self._growth_s = 0.0
        self._events: list[Event] = []
        self._aborting: list[Seat] = []

    # --- what callers use ---

    def submit(self, now_s: float, request: Request) -> None:
        """A turn arrives. Its events come with `advance`; its last is one of Finished, Aborted, Refused and Failed.

        `rid` must not be that of a turn that has not ended.
        """
        self._run_to(now_s)
        self.counters.requests += 1
        room = self.profile.device_tokens - -(-request.prompt_tokens // self._page) * self._page - self._page
        if room < 1:
            self._refuse(request, now_s, "too_long")
            return
        if self._queue.full and not self._displace(now_s, request):
            self._refuse(request, now_s, "queue_full")
            return
        seat = Seat(request, room, self._rate(request.rid))
        blocked = len(self._queue) > 0 and not self._queue.by_priority
        self._queue.put(seat)
        if self._phase == _IDLE:
            self._begin(now_s)
        elif self._phase == _DECODE and not blocked and len(self._batch) < self.profile.max_running:
            self._cut(now_s)

    def abort(self, now_s: float, rid_prefix: str) -> int:
        """End every turn whose id starts with `rid_prefix`, as SGLang's `/abort_request` does; how many there are.

        Waiting ones end at once, others at the end of their decode step or prefill pass.
        """
        self._run_to(now_s)
        waiting = [seat for seat in self._queue if seat.request.rid.startswith(rid_prefix)]
        for seat in waiting:
            self._queue.take(seat)
            self._end_aborted(seat, now_s)
        held = [seat for seat in self._held() if not seat.aborted and seat.request.rid.startswith(rid_prefix)]
        for seat in held:
            seat.aborted = True
            self._aborting.append(seat)
        if held and self._phase == _DECODE:
            self._cut(now_s)
        return len(waiting) + len(held)

    def next_event_s(self) -> float:
        """When something happens next if nothing is submitted; infinity when idle. Already due if events wait."""
        return self._events[0].at_s if self._events else self._ends_s

    def advance(self, now_s: float) -> list[Event]:
        """Let time pass up to `now_s`, inclusive, and take the events since the last call, oldest first."""
        self._run_to(now_s)
        events, self._events = self._events, []
        return events

    def next_step_s(self, now_s: float) -> float:
        """When a running turn says its next tokens; infinity where none decodes. For callers that stream."""
        if self._phase != _DECODE:
            return inf
        return self._began_s + span_s(self._step_s, self._growth_s, min(self._steps_done(now_s) + 1, self._steps))

    def progress(self, now_s: float) -> list[Progress]:
        """Turns that have said more than at the last call, and how much; a turn's last tokens come with its end."""
        self._run_to(now_s)
        step = self._batch.step + self._steps_done(now_s)
        told = []
        for rid, seat in self._batch.seats.items():
            said = seat.said(step)
            if said > seat.told:
                seat.told = said
                told.append(Progress(rid, said))
        return told

    def flush(self, now_s: float) -> bool:
        """Empty both tiers; only an idle replica does, as SGLang's `/flush_cache`."""
        self._run_to(now_s)
        if self._phase != _IDLE:
            return False
        self._memory.cache.clear()
        self._memory.ratio = NewTokenRatio()
        return True

    def load(self, now_s: float) -> tuple[int, int, int]:
        """What probes ask most: turns that run, turns that wait, and their tokens to prefill; as `snapshot` has it."""
        self._run_to(now_s)
        prefilling = 0
        if self._phase != _IDLE:
            prefilling = len({seat.request.rid for seat in self._held()} - self._batch.seats.keys())
        waiting = len(self._queue)
        return len(self._batch) + prefilling, waiting, sum(map(self._uncached, self._queue)) if waiting else 0

    def snapshot(self, now_s: float) -> Snapshot:
        """How things stand."""
        running, waiting, uncached_tokens = self.load(now_s)
        done = self._steps_done(now_s)
        memory, page = self._memory, self._page
        cache, growth = memory.cache, self._batch.held_pages(done) - self._batch.held_pages()
        speed = self._batch.rate / MILLI / self._step_s if self._phase == _DECODE else 0.0
        return Snapshot(
            running=running,
            waiting=waiting,
            waiting_uncached_tokens=uncached_tokens,
            locked_tokens=cache.pinned_pages * page,
            held_tokens=(memory.prefill_pages + self._batch.held_pages(done)) * page,
            evictable_tokens=cache.evictable_pages * page,
            free_tokens=(memory.free_pages() - growth) * page,
            host_tokens=cache.host_pages * page,
            sequence_tokens=int(self._batch.length_tokens(done)),
            tokens_per_s=speed,
            counters=self._counted(),
        )

    # --- phases ---

    def _run_to(self, now_s: float) -> None:
        while self._ends_s <= now_s and self._phase != _IDLE:
            if self._phase == _PREFILL:
                self._end_pass(self._ends_s)
            else:
                self._end_segment(self._ends_s)
            self._begin(self._ends_s)

    def _begin(self, at_s: float) -> None:
        """Choose the next phase. `_ends_s` and all that the phase needs are set before this returns."""
        self._began_s = at_s
        if self._aborting:
            self._abort_held(at_s)
        if not (self._owed_steps and self._batch.seats) and (self._queue or self._half_done):
            work_s = self._compose(at_s)
            if self._passing:
                self._phase = _PREFILL
                self._ends_s = at_s + self.profile.prefill_base_s + work_s
                return
        if self._batch.seats and self._grow(at_s):
            self._phase = _DECODE
            return
        if self._queue or self._half_done:  # the whole batch failed or was retracted
            self._owed_steps = 0
            self._begin(at_s)
            return
        self._phase, self._ends_s = _IDLE, inf

    def _compose(self, at_s: float) -> float:
        """Put a prefill pass together in `_passing`; its computing seconds."""
        budget, work_s, load_tokens = self.profile.chunk_tokens, 0.0, 0
        self._passing = []
        if self._half_done is not None:
            seat = self._half_done
            tokens = self._take(seat, budget, first=True)
            if not tokens:
                return 0.0
            work_s += prefill_s(self.profile, tokens, seat.filled)
            budget -= -(-tokens // self._page) * self._page
        while self._queue and budget >= self._page and len(self._batch) + len(self._passing) < self.profile.max_running:
            seat = self._queue.head()
            if not self._admit(seat, at_s):
                break
            load_tokens += seat.loaded_tokens
            tokens = self._take(seat, budget, first=False)
            work_s += prefill_s(self.profile, tokens, seat.filled)
            budget -= -(-tokens // self._page) * self._page
        return max(work_s, load_tokens / self.profile.host_load_tokens_per_s)

    def _take(self, seat: Seat, budget: int, *, first: bool) -> int:
        """Give a pinned turn as much of a pass as budget and memory allow; the tokens it computes, 0 if none."""
        tokens = seat.target - seat.filled
        limit = budget
        if first:
            limit = min(limit, (self._memory.obtainable_pages() + seat.held_pages) * self._page)
        if tokens > limit:
            tokens = (seat.filled + limit) // self._page * self._page - seat.filled
        if tokens <= 0:
            return 0
        assert seat.tip is not None
        self._memory.hold(seat, -(-(seat.filled + tokens) // self._page) - seat.tip.end)
        self._passing.append((seat, tokens))
        return tokens

    def _end_pass(self, at_s: float) -> None:
        passing, self._passing = self._passing, []
        self._half_done = None
        self.counters.prefill_busy_s += at_s - self._began_s
        self._owed_steps = self.profile.decode_steps_between_prefills
        for seat, tokens in passing:
            self.counters.prefilled_tokens += tokens
            seat.filled += tokens
            self._memory.keep(seat, seat.filled, at_s)
            if seat.filled < seat.target:
                self._half_done = seat
                continue
            seat.base += 1
            self._memory.drop(seat)
            if seat.base == 1:
                self._events.append(FirstToken(seat.request.rid, at_s))
            if seat.base >= seat.output_tokens:
                self._finish(seat, at_s)
            else:
                self._batch.join(seat, reserve_of(seat.allowed))

    def _grow(self, at_s: float) -> bool:
        """Start a decode segment, retracting turns until it fits; False if no turn is left."""
        batch, profile = self._batch, self.profile
        while batch.seats:
            steps = batch.next_finish() - batch.step
            steps = self._memory.steps_that_fit(min(steps, self._owed_steps) if self._owed_steps else steps)
            if steps:
                size = len(batch)
                self._step_s = (
                    profile.decode_base_s
                    + profile.decode_per_sequence_s * size
                    + profile.decode_per_kv_token_s * batch.length_tokens()
                )
                self._growth_s = profile.decode_per_kv_token_s * batch.rate / MILLI
                self._steps = steps
                self._ends_s = at_s + span_s(self._step_s, self._growth_s, steps)
                return True
            self._retract(at_s)
        return False

    def _steps_done(self, now_s: float) -> int:
        """Whole steps of the decode segment under way."""
        if self._phase != _DECODE:
            return 0
        done = steps_until(self._step_s, self._growth_s, now_s - self._began_s)
        # The same sum as `next_step_s` makes, so that what it announces has happened by then.
        if done < self._steps and self._began_s + span_s(self._step_s, self._growth_s, done + 1) <= now_s:
            done += 1
        return min(done, self._steps)

    def _cut(self, now_s: float) -> None:
        """End the decode segment with the step under way."""
        done = self._steps_done(now_s)
        if done + 1 < self._steps:
            self._steps = done + 1
            self._ends_s = self._began_s + span_s(self._step_s, self._growth_s, self._steps)

    def _end_segment(self, at_s: float) -> None:
        batch, steps = self._batch, self._steps
        batch.step += steps
        self.counters.decode_steps += steps
        self.counters.verify_calls += steps * len(batch)
        self._memory.ratio.decay(steps)
        self._owed_steps = max(0, self._owed_steps - steps)
        for seat in batch.done():
            batch.leave(seat, reserve_of(seat.allowed))
            self._finish(seat, at_s)

    # --- turns ---

    def _displace(self, now_s: float, request: Request) -> bool:
        """Make room in the full queue by refusing one that waits, where priorities allow."""
        least = self._queue.displaceable(request.priority)
        if least is None:
            return False
        self._queue.take(least)
        self._refuse(least.request, now_s, "displaced")
        return True

    def _refuse(self, request: Request, at_s: float, reason: str) -> None:
        self.counters.refused += 1
        self._events.append(Refused(request.rid, at_s, reason))

    def _admit(self, seat: Seat, at_s: float) -> bool:
        """Take the head of the queue in, with its prefix pinned and on the device; False where memory is too short."""
        request, memory, page = seat.request, self._memory, self._page
        cache = memory.cache
        limit = min((seat.target - 1) // page, len(request.pages))
        device, found = cache.match(request.pages, limit)
        if (found - device) * page < _LOAD_BACK_TOKENS_MIN:
            found = device
        tip = cache.pin(request.pages, found, at_s)
        need = seat.target - device * page + reserve_of(seat.allowed - seat.base) + page
        if (self._batch.seats or self._passing) and not memory.admits(need, self._passing):
            cache.release(tip, at_s)
            return False
        if found > device:
            memory.make_room(found - device)
            cache.load(tip)
            self.counters.loaded_tokens += (found - device) * page
        self._queue.take(seat)
        seat.tip, seat.filled = tip, found * page
        seat.loaded_tokens = (found - device) * page
        if not seat.started:
            seat.started = True
            seat.device_tokens, seat.host_tokens = device * page, (found - device) * page
            counters = self.counters
            counters.prompt_tokens += request.prompt_tokens
            counters.cached_device_tokens += seat.device_tokens
            counters.cached_host_tokens += seat.host_tokens
            self._events.append(Started(request.rid, at_s, seat.device_tokens, seat.host_tokens))
        return True

    def _finish(self, seat: Seat, at_s: float) -> None:
        said = seat.output_tokens
        self._memory.keep(seat, seat.request.prompt_tokens + said - 1, at_s)
        self._let_go(seat, at_s)
        self.counters.output_tokens += said
        request = seat.request
        self._events.append(
            Finished(
                request.rid, at_s, request.prompt_tokens, seat.device_tokens, seat.host_tokens, said, seat.retractions
            )
        )

    def _let_go(self, seat: Seat, at_s: float) -> None:
        assert seat.tip is not None
        self._memory.cache.release(seat.tip, at_s)
        seat.tip = None

    def _retract(self, at_s: float) -> None:
        """Free the turn that has said least (of those, the longest); fail it if it is the last."""
        step = self._batch.step
        victim = min(self._batch.seats.values(), key=lambda seat: (seat.said(step), -seat.request.prompt_tokens))
        last = len(self._batch) == 1 and self._half_done is None
        self._batch.leave(victim, reserve_of(victim.allowed))
        self._let_go(victim, at_s)
        if last:
            self.counters.output_tokens += victim.base
            self._events.append(Failed(victim.request.rid, at_s, victim.base))
            return
        request = victim.request
        self.counters.retractions += 1
        self.counters.retracted_input_tokens += request.prompt_tokens
        self.counters.retracted_output_tokens += victim.base
        victim.retractions += 1
        victim.target, victim.filled = request.prompt_tokens + victim.base, 0
        self._events.append(Retracted(request.rid, at_s))
        self._queue.put(victim)
        self._memory.ratio.retracted(self._batch.seats.values(), step)

    def _abort_held(self, at_s: float) -> None:
        aborting, self._aborting = self._aborting, []
        for seat in aborting:
            if seat.tip is None:
                continue  # it ended in the phase that was under way
            if seat.request.rid in self._batch.seats:
                self._batch.leave(seat, reserve_of(seat.allowed))
                self._memory.keep(seat, seat.filled, at_s)
            else:
                self._memory.drop(seat)
                self._half_done = None
            self._let_go(seat, at_s)
            self._end_aborted(seat, at_s)

    def _end_aborted(self, seat: Seat, at_s: float) -> None:
        self.counters.aborted += 1
        self.counters.output_tokens += seat.base
        self._events.append(Aborted(seat.request.rid, at_s, seat.base))

    # --- sums ---

    def _held(self) -> list[Seat]:
        """Turns that are past the queue."""
        seats = [*self._batch.seats.values(), *(seat for seat, _ in self._passing)]
        if self._half_done is not None and self._half_done not in seats:
            seats.append(self._half_done)
        return seats

    def _uncached(self, seat: Seat) -> int:
        limit = min((seat.target - 1) // self._page, len(seat.request.pages))
        return seat.target - self._memory.cache.match(seat.request.pages, limit)[1] * self._page

    def _counted(self) -> Counters:
        cache, page = self._memory.cache, self._page
        return replace(
            self.counters,
            evicted_device_tokens=cache.evicted_device_pages * page,
            evicted_host_tokens=cache.evicted_host_pages * page,
            backed_up_tokens=cache.backed_up_pages * page,
        )

    def _rate(self, rid: str) -> int:
        """A turn's decode rate, thousandths of a token per step."""
        profile = self.profile
        if not profile.accept_spread:
            return round(profile.accept_length * MILLI)
        unit = xxh3_64_intdigest(rid.encode(), self.seed & (1 << 64) - 1) / (1 << 64)
        return max(MILLI, round(profile.accept_length * (1 + profile.accept_spread * (2 * unit - 1)) * MILLI))
