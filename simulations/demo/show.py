"""Plays the story: acts in their time, a look twice a second, a frame for each look, and the sums at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from router.domain.turn import Dialect
from router.lifecycle.fleet import replica_id
from router.placement.identity import ANONYMOUS, session_key
from simulations import profiles, workload
from simulations.demo.cast import THINK_MAX_S, Cast
from simulations.demo.lookout import Lookout, Sight
from simulations.demo.programme import POLICIES, SESSION_HEADER, Compared, Programme
from simulations.demo.screen import Frame, Reason, Row, Totals
from simulations.demo.stage import Stage, StageFailed, stage
from simulations.demo.story import Act, Acts, Scene, caption
from simulations.demo.tally import FIRST, Placement, Placements, Seats, spread_of
from simulations.measure import percentile
from simulations.replay import Load, Replay, Wording
from simulations.replay_client import Client
from simulations.trace import Tree

__all__ = ["Plan", "Show"]

REPLICAS: Final = 4
_LOOK_EVERY_S: Final = 0.5
_SETTLE_S: Final = 5.0
"""How long in-flight may take to come down once the last turn has ended."""
_READY_S: Final = 20.0
_RAMP_SHARE: Final = 0.6
"""Of the first act, over which the first sessions begin."""
_MORE_RAMP_SHARE: Final = 0.4
_RECENT: Final = 4
_ENCORE_MAX_S: Final = 600.0
"""Every turn is remembered: a demo that someone forgot ends itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played."""

    seed: int
    sessions: int
    port: int
    acts: Acts
    encore: bool
    """Whether traffic goes on after the story until `finish`."""
    time_scale: float = 10.0
    profile: str = "kimi-k2.6-b200-tp4"

    @property
    def more_sessions(self) -> int:
        """Sessions more from the join on: half as many again."""
        return -(-self.sessions // 2)

    def programme(self) -> Programme:
        """The same story for virtual time."""
        acts, scale = self.acts, self.time_scale
        return Programme(
            profile=self.profile,
            seed=self.seed,
            sessions=self.sessions,
            replicas=REPLICAS,
            ramp_s=acts.arrive_s * _RAMP_SHARE * scale,
            fan_out_at_s=acts.arrive_s * scale,
            more_sessions=self.more_sessions,
            more_ramp_s=acts.join_s * _MORE_RAMP_SHARE * scale,
            join_at_s=(acts.arrive_s + acts.fan_out_s) * scale,
            duration_s=acts.total_s * scale,
        )


class Show:
    """One showing; `play` once. `draw` gets a frame twice a second."""

    def __init__(self, plan: Plan, draw: Callable[[Frame], None]) -> None:
        self.act = Act.ARRIVE
        self._plan = plan
        self._draw = draw
        self._cast = Cast(plan.seed)
        self._seats = Seats()
        self._placements = Placements()
        self._names: dict[str, str] = {}
        """What replicas are called, by id, in the order they came."""
        self._sessions: dict[str, str] = {}
        """What sessions are called, by the router's digest."""
        self._newcomer: str | None = None
        self._compared: list[Compared] = []
        self._sight: Sight | None = None
        self._finish = asyncio.Event()
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._replay: Replay
        self._stage: Stage

    def finish(self) -> None:
        """End the encore."""
        self._finish.set()

    async def play(self) -> dict[str, Any]:
        """The whole story; its figures. Raises what `stage` raises, and OSError."""
        plan = self._plan
        profile = profiles.load(plan.profile)
        async with (
            stage(
                profile, replicas=REPLICAS, port=plan.port, time_scale=plan.time_scale, seed=plan.seed
            ) as self._stage,
            Client.session() as clients,
            aiohttp.ClientSession() as looking,
        ):
            lookout = Lookout(looking, self._stage.admin_url)
            await self._ready(lookout, REPLICAS)
            self._replay = self._prepared(clients, profile.model)
            self._began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(lookout), name="watch")
                playing = group.create_task(self._replay.run(self._trees()), name="replay")
                await self._acts(lookout)
                if not plan.encore:
                    await self._curtain(playing)
                await self._compare()
                if plan.encore:
                    self.act = Act.ENCORE
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ENCORE_MAX_S):
                            await self._finish.wait()
                    await self._curtain(playing)
                watching.cancel()
            in_flight = await self._settled(lookout)
        return self._report(in_flight)

    def frame(self) -> Frame:
        """What is on the screen now."""
        plan, stage_ = self._plan, self._stage
        now_s = self._ended_s if self._ended_s is not None else time.monotonic()
        wall_s = now_s - self._began_s
        taken = f" (port {plan.port} is taken)" if stage_.port_taken else ""
        profile = stage_.profile
        return Frame(
            where=f"{stage_.url}{taken}  admin {stage_.admin_url}",
            about=(
                f"{plan.sessions} agent sessions, simulated {profile.model} replicas ({profile.tp_size} × "
                f"{profile.accelerator.removeprefix('NVIDIA ')} each), "
                f"{plan.time_scale:g} × as fast; seconds are theirs"
            ),
            clock=f"{wall_s * plan.time_scale:.0f} s",
            act=self.act.value,
            caption=caption(self._scene()),
            rows=self._rows(),
            totals=self._totals(),
            recent=[self._reason(each) for each in self._placements.recent(_RECENT)],
            compared=tuple(self._compared),
        )

    # --- the acts ---------------------------------------------------------------------------------------------------

    async def _ready(self, lookout: Lookout, count: int) -> None:
        """Until the router knows that many replicas to be well. It tells nobody: looking is all one can do."""
        try:
            async with asyncio.timeout(_READY_S):
                while len(self._take(await lookout.look()).healthy) < count:  # noqa: ASYNC110 (see above)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise StageFailed(f"the router did not find its {count} replicas ready within {_READY_S:g} s") from None

    def _prepared(self, clients: aiohttp.ClientSession, model: str) -> Replay:
        plan = self._plan
        load = Load(
            sessions=plan.sessions,
            time_scale=plan.time_scale,
            ramp_s=plan.programme().ramp_s,
            think_max_s=THINK_MAX_S,
            seed=plan.seed,
        )
        wording = Wording(
            model=model, block_tokens=workload.BLOCK_TOKENS, global_blocks=True, session_header=SESSION_HEADER
        )
        return Replay(Client(clients, self._stage.url, Dialect.CHAT), load, wording, progress=self._turn_ended)

    def _trees(self) -> Iterator[Tree]:
        for tree in self._cast:
            self._seats.enter(tree)
            self._sessions[session_key(ANONYMOUS, f"{tree.id}-{self._plan.seed}".encode())] = tree.id
            yield tree

    def _turn_ended(self) -> None:
        self._seats.take(self._replay.measured.results[-1])

    async def _acts(self, lookout: Lookout) -> None:
        acts = self._plan.acts
        await asyncio.sleep(acts.arrive_s)
        self.act = Act.FAN_OUT
        self._cast.ask_for_fan_out()
        self._replay.grow(1, 0.0)
        await asyncio.sleep(acts.fan_out_s)
        self.act = Act.JOIN
        until_s = time.monotonic() + acts.join_s
        engine = await self._stage.another_engine()
        self._take(await lookout.look())
        self._newcomer = replica_id(engine.url)
        self._placements.join(self._newcomer, time.time())
        await lookout.add(engine.url)
        programme = self._plan.programme()
        self._replay.grow(programme.more_sessions, programme.more_ramp_s)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def _curtain(self, playing: asyncio.Task[None]) -> None:
        """No more turns; those in flight end."""
        self._replay.stop()
        await playing
        self._ended_s = time.monotonic()

    async def _compare(self) -> None:
        """The other policies, in a process of its own."""
        self.act = Act.COMPARE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "simulations.demo.versus",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us to handle
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(self._plan.programme()))
            process.stdin.close()
            async for line in process.stdout:
                self._compared.append(msgspec.json.decode(line, type=Compared))
            if await process.wait():
                raise StageFailed("the comparison failed; what it said is above")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _watch(self, lookout: Lookout) -> None:
        while True:
            self._take(await lookout.look())
            self._draw(self.frame())
            await asyncio.sleep(_LOOK_EVERY_S)

    def _take(self, sight: Sight) -> Sight:
        self._sight = sight
        for each in sight.replicas:
            if each.id not in self._names:
                self._names[each.id] = chr(ord("A") + len(self._names))
        self._placements.take(sight.decisions, sight.healthy)
        return sight

    async def _settled(self, lookout: Lookout) -> int:
        """What is in flight once everything should have come to rest."""
        until_s = time.monotonic() + _SETTLE_S
        while (sight := self._take(await lookout.look())).in_flight and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return sight.in_flight

    # --- what is said -----------------------------------------------------------------------------------------------

    def _scene(self) -> Scene:
        placements, tree = self._placements, self._cast.fan_out
        return Scene(
            act=self.act,
            sessions=len(placements.sessions),
            reasons=placements.reasons,
            spread=None if tree is None else spread_of(tree, self._replay.measured.results),
            names=self._names,
            newcomer=None if self._newcomer is None else self._names.get(self._newcomer),
            new_sessions=placements.new_sessions_after_join,
            newcomer_sessions=placements.newcomer_new_sessions,
            newcomer_of_first=placements.newcomer_of_first,
            old_branches=placements.old_branches,
            moved_by_join=placements.moved_by_join,
            compared=tuple(self._compared),
            policies=len(POLICIES),
        )

    def _rows(self) -> list[Row]:
        if self._sight is None:
            return []
        sessions = self._seats.sessions()
        return [
            Row(
                name=self._names[each.id],
                phase=each.phase,
                in_flight=each.in_flight,
                locked_tokens=each.locked_tokens,
                cached_tokens=each.cached_tokens,
                free_tokens=each.free_tokens,
                sessions=sessions[each.id],
                hit_rate=each.hit_rate,
                ttft_p50_s=self._simulated_s(self._seats.ttft_p50_s(each.id)),
                newcomer=each.id == self._newcomer,
            )
            for each in sorted(self._sight.replicas, key=lambda each: self._names[each.id])
        ]

    def _totals(self) -> Totals:
        measured = self._replay.measured
        done = [each for each in measured.results if each.error is None]
        ttft_s = sorted(each.ttft_s for each in done if each.ttft_s is not None)
        prompt = sum(each.prompt_tokens for each in self._sight.replicas) if self._sight else 0
        hit = sum(each.hit_tokens for each in self._sight.replicas) if self._sight else 0
        sent = sum(each.sent_tokens for each in done)
        return Totals(
            turns=len(done),
            errors=measured.errors,
            hit_rate=hit / prompt if prompt else None,
            hit_rate_infinite=sum(each.infinite_tokens for each in done) / sent if sent else None,
            moves=self._placements.moves,
            ttft_p50_s=self._simulated_s(percentile(ttft_s, 0.50) if ttft_s else None),
            ttft_p99_s=self._simulated_s(percentile(ttft_s, 0.99) if ttft_s else None),
            reasons=self._placements.reasons.most_common(),
        )

    def _reason(self, each: Placement) -> Reason:
        scale = self._plan.time_scale
        return Reason(
            why=each.reason,
            session=self._sessions.get(each.session, "yours"),
            replica=self._names.get(each.replica, each.replica),
            prompt_tokens=each.prompt_tokens,
            cached_tokens=each.cached_tokens,
            cost_s=each.cost_s * scale,
            other=None if each.other is None else self._names.get(each.other, each.other),
            other_s=each.other_s * scale,
            because=each.because,
        )

    def _simulated_s(self, wall_s: float | None) -> float | None:
        return None if wall_s is None else wall_s * self._plan.time_scale

    def _report(self, in_flight: int) -> dict[str, Any]:
        """What `--json` holds; seconds are simulated."""
        plan, placements, tree = self._plan, self._placements, self._cast.fan_out
        figures, totals = self._replay.measured.figures(), self._totals()
        spread = None if tree is None else spread_of(tree, self._replay.measured.results)
        ended_s = self._ended_s if self._ended_s is not None else time.monotonic()
        return {
            "turns": figures["turns"],
            "errors": figures["errors"],
            "errors_by": figures["errors_by"],
            "hit_rate": figures["hit_rate"],
            "hit_rate_infinite": figures["hit_rate_infinite"],
            "ttft_p50_s": totals.ttft_p50_s,
            "ttft_p99_s": totals.ttft_p99_s,
            "in_flight_after": in_flight,
            "moves": placements.moves,
            "moved_by_join": placements.moved_by_join,
            "old_branches_at_join": placements.old_branches,
            "newcomer_new_sessions": placements.newcomer_new_sessions,
            f"newcomer_of_first_{FIRST}": placements.newcomer_of_first,
            "new_sessions_after_join": placements.new_sessions_after_join,
            "reasons": dict(placements.reasons),
            "fan_out": None if spread is None else msgspec.to_builtins(spread),
            "per_replica": {self._names.get(name, name): share for name, share in figures["per_replica"].items()},
            "comparison": {each.policy: each._asdict() for each in self._compared},
            "simulated": True,
            "simulated_s": (ended_s - self._began_s) * plan.time_scale,
            "time_scale": plan.time_scale,
            "seed": plan.seed,
            "sessions": plan.sessions,
        }
