"""Replicas come, rest and go at run time, for all routers at once, and sessions hardly notice."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from router.settings import Fleet, Placement, Settings
from tests.integration.conversations import Conversation
from tests.integration.replicas import Gate, Replica, Visit, events, replicas
from tests.integration.roosts import PROBE_INTERVAL_S, running, settings_for, shared_store


def sharing(fleet: list[Replica], url: str, name: str) -> Settings:
    return settings_for(fleet, shared_store(url, name))


async def test_a_replica_that_joins_moves_nobody_and_gets_the_new_ones() -> None:
    """C15: of sixty live sessions none moves; the next new ones go mostly to the newcomer until all are even."""
    async with replicas(4) as fleet:
        old, newcomer = fleet[:3], fleet[3]
        # The newcomer's slow start is tested below; here it would count seconds.
        settings = settings_for(old, placement=Placement(ramp_s=0.001))
        async with running(settings, old) as roost:
            sessions = [Conversation(f"live {n}", header=("x-session-id", str(n))) for n in range(60)]
            homes = [(await roost.turn(each)).replica for each in sessions]
            assert Counter(Counter(homes).values()) == {20: 3}
            assert (await roost.admin("POST", "/admin/replicas", {"url": newcomer.url}))[0] == 201
            await roost.knows(fleet)
            for _ in range(2):
                for each in sessions:
                    each.grow()
                assert [(await roost.turn(each)).replica for each in sessions] == homes
            fresh = [(await roost.turn(Conversation(f"new {n}"))).replica for n in range(16)]
            assert fresh.count(newcomer.id) >= 14


async def test_a_newcomer_is_not_flooded() -> None:
    """C16: a burst right after the join gives it its first turns, and no more before these have finished."""
    async with replicas(4) as fleet:
        old, newcomer = fleet[:3], fleet[3]
        async with running(settings_for(old, placement=Placement(ramp_s=1e6)), old) as roost:
            for number in range(12):
                await roost.turn(Conversation(f"old {number}"))
            await roost.admin("POST", "/admin/replicas", {"url": newcomer.url})
            await roost.knows(fleet)
            gate = Gate()
            for replica in fleet:
                replica.script = gate
            burst = [asyncio.create_task(roost.turn(Conversation(f"burst {n}"))) for n in range(20)]
            await gate.waiting(20)
            gate.open()
            counts = Counter(answer.replica for answer in await asyncio.gather(*burst))
            assert 2 <= counts[newcomer.id] <= 5


@pytest.mark.parametrize("how", ["drain", "delete"])
async def test_what_one_router_is_told_the_other_does_at_once(valkey_url: str, how: str) -> None:
    """The very next turn through the other router obeys; sessions of the replica move once each and stay."""
    async with replicas(3) as fleet:
        settings = sharing(fleet, valkey_url, how)
        async with running(settings, fleet) as told, running(settings, fleet) as other:
            sessions = [Conversation(f"{how} {n}", header=("x-session-id", str(n))) for n in range(12)]
            homes = {each.name: (await other.turn(each)).replica for each in sessions}
            leaving = fleet[0]
            path = f"/admin/replicas/{leaving.id}"
            status, _ = await (told.admin("DELETE", path) if how == "delete" else told.admin("POST", f"{path}/drain"))
            assert status == 200
            before = len(leaving.seen)
            moved = {}
            for each in sessions:
                each.grow()
                answer = await other.turn(each)
                assert answer.reason == ("home_gone" if homes[each.name] == leaving.id else "home")
                moved[each.name] = answer.replica
            assert leaving.id not in moved.values()
            assert len(leaving.seen) == before
            for each in sessions:
                each.grow()
                assert (await told.turn(each)).replica == moved[each.name]


async def test_a_replica_whose_name_no_store_takes_is_refused_and_not_an_error() -> None:
    """Ids in the store have at most 255 bytes, those of idn hosts included."""
    async with running(settings_for([])) as roost:
        for host in ("a" * 260, ".".join(["a" * 60] * 5), "ü" * 200):
            status, told = await roost.admin("POST", "/admin/replicas", {"url": f"http://{host}:1"})
            assert status == 400, host
            assert told["error"].startswith("url ")
        assert await roost.replicas() == {}


async def test_a_cordoned_replica_keeps_its_sessions_and_gets_no_new_ones(valkey_url: str) -> None:
    async with replicas(3) as fleet:
        settings = sharing(fleet, valkey_url, "cordon")
        async with running(settings, fleet) as told, running(settings, fleet) as other:
            sessions = [Conversation(f"cordoned {n}", header=("x-session-id", str(n))) for n in range(6)]
            homes = [(await other.turn(each)).replica for each in sessions]
            resting = fleet[0].id
            assert await told.admin("POST", f"/admin/replicas/{resting}/cordon") == (
                200,
                {"id": resting, "fleet": "default", "standing": "cordoned"},
            )
            for each in sessions:
                each.grow()
            assert [(await other.turn(each)).replica for each in sessions] == homes
            new = [(await other.turn(Conversation(f"fresh {n}"))).replica for n in range(6)]
            assert resting not in new
            await told.admin("POST", f"/admin/replicas/{resting}/undrain")
            assert (await other.replicas())[resting]["standing"] == "serving"
            assert resting in {(await other.turn(Conversation(f"later {n}"))).replica for n in range(6)}


async def test_a_stream_under_way_outlives_its_replicas_drain_and_removal() -> None:
    """C17: the stream goes on to its end; no new request reaches the replica."""
    first, go_on = asyncio.Event(), asyncio.Event()

    async def slow(visit: Visit) -> None:
        await visit.begin()
        told = events(visit.seen.dialect, "r", 1)
        await visit.chunk(told[0])
        first.set()
        await go_on.wait()
        for event in told[1:]:
            await visit.chunk(event)
        await visit.end()

    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("long")
        answer = await roost.turn(asked)
        home = next(each for each in fleet if each.id == answer.replica)
        speak, home.script = home.script, slow
        asked.grow()
        running_turn = asyncio.create_task(roost.turn(asked))
        await first.wait()
        home.script = speak
        await roost.admin("POST", f"/admin/replicas/{home.id}/drain")
        await roost.admin("DELETE", f"/admin/replicas/{home.id}")
        seen = len(home.seen)
        new = [(await roost.turn(Conversation(f"new {n}"))).replica for n in range(3)]
        go_on.set()
        answer = await running_turn
        assert (answer.replica, answer.body.endswith(b"data: [DONE]\n\n")) == (home.id, True)
        assert home.id not in new
        asked.grow()
        assert (await roost.turn(asked)).replica != home.id
        assert len(home.seen) == seen


@pytest.mark.parametrize("how", ["between two looks", "seen to be away"])
async def test_a_restarted_replica_is_another_one(how: str) -> None:
    """C52: same address, new life: its sessions' KV is gone, they are placed anew by load, and nobody sees an error."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        sessions = [Conversation(f"restart {n}", header=("x-session-id", str(n))) for n in range(8)]
        homes = [(await roost.turn(each)).replica for each in sessions]
        reborn = fleet[0]
        was = (await roost.replicas())[reborn.id]
        assert was["load"]["admitted_tokens"] > 0
        looked = reborn.probes

        async def looked_again() -> bool:
            return reborn.probes > looked + 3

        async def away() -> bool:
            return not (await roost.replicas())[reborn.id]["healthy"]

        await roost.until(looked_again)
        if how == "seen to be away":
            await reborn.stop()
            await roost.until(away)
        await reborn.restart()

        async def another_life() -> bool:
            now = (await roost.replicas())[reborn.id]
            return bool(now["healthy"]) and now["incarnation"] != was["incarnation"]

        await roost.until(another_life)
        now = (await roost.replicas())[reborn.id]
        assert (now["load"]["admitted_tokens"], now["load"]["crowd"]) == (0, 0)
        assert now["joined_at_s"] > was["joined_at_s"]
        moved = []
        for each, home in zip(sessions, homes, strict=True):
            each.grow()
            answer = await roost.turn(each)
            moved.append(answer.replica)
            if home != reborn.id:
                assert (answer.replica, answer.reason) == (home, "home")
            else:
                assert answer.reason in ("home_gone", "new", "fork")
                assert (await roost.decisions())[0]["predicted_cached_tokens"] == 0
        for each in sessions:
            each.grow()
        assert [(await roost.turn(each)).replica for each in sessions] == moved


async def test_a_replica_that_says_it_is_not_ready_gets_no_turns_until_it_is() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        fleet[0].ready = False

        async def noticed() -> bool:
            return not (await roost.replicas())[fleet[0].id]["healthy"]

        await roost.until(noticed)
        assert {(await roost.turn(Conversation(f"a {n}"))).replica for n in range(4)} == {fleet[1].id}
        fleet[0].ready = True
        await roost.knows(fleet)
        assert fleet[0].id in {(await roost.turn(Conversation(f"b {n}"))).replica for n in range(4)}


async def test_a_stream_outlives_that_its_replica_is_no_longer_ready() -> None:
    """It may be about to stop, or reload its weights: what runs there is its own to finish."""
    go_on, begun = asyncio.Event(), asyncio.Event()

    async def slow(visit: Visit) -> None:
        first, *rest = events(visit.seen.dialect, "r", 1)
        await visit.begin()
        await visit.chunk(first)
        begun.set()
        await go_on.wait()
        for event in rest:
            await visit.chunk(event)
        await visit.end()

    async with replicas(2, script=slow) as fleet, running(settings_for(fleet), fleet) as roost:
        turn = asyncio.create_task(roost.turn(Conversation("long")))
        await begun.wait()
        home = next(each for each in fleet if each.running)
        home.ready = False

        async def noticed() -> bool:
            return not (await roost.replicas())[home.id]["healthy"]

        await roost.until(noticed)
        go_on.set()
        answer = await turn
        assert (answer.replica, answer.body.endswith(b"data: [DONE]\n\n")) == (home.id, True)


async def test_the_admin_api_says_what_is_wrong() -> None:
    """Wrong bodies, ids, paths and fleets: a status and one sentence, and nothing is changed."""
    async with replicas(1) as fleet:
        one = Fleet(name="one", models=("m",), replicas=(fleet[0].url,), probe_interval_s=PROBE_INTERVAL_S)
        async with running(settings_for([one]), fleet) as roost:
            wrong: list[tuple[str, str, object, int]] = [
                ("POST", "/admin/replicas", {}, 400),
                ("POST", "/admin/replicas", [], 400),
                ("POST", "/admin/replicas", {"url": 5}, 400),
                ("POST", "/admin/replicas", {"url": "ftp://x"}, 400),
                ("POST", "/admin/replicas", {"url": "http://u:p@x:1"}, 400),
                ("POST", "/admin/replicas", {"url": "http://x:99999999"}, 400),
                ("POST", "/admin/replicas", {"url": "http://" + "x" * 2000}, 400),
                ("POST", "/admin/replicas", {"url": "http://x:1/v1"}, 400),
                ("POST", "/admin/replicas", {"url": "http://x:0"}, 400),
                ("POST", "/admin/replicas", {"url": "http://x y:1"}, 400),
                ("POST", "/admin/replicas", {"url": "http://x:1", "flet": "one"}, 400),
                ("POST", "/admin/replicas", {"url": fleet[0].url, "fleet": "none"}, 404),
                ("POST", "/admin/replicas", {"url": fleet[0].url, "fleet": 5}, 404),
                ("DELETE", "/admin/replicas/nobody:1", None, 404),
                ("POST", "/admin/replicas/nobody:1/drain", None, 404),
                ("POST", f"/admin/replicas/{fleet[0].id}/explode", None, 404),
                ("GET", "/admin/decisions?limit=many", None, 400),
                ("GET", "/admin/decisions?limit=-1", None, 400),
                ("GET", "/nothing", None, 404),
                ("PUT", "/admin/replicas", None, 405),
            ]
            for method, path, body, status in wrong:
                answered, told = await roost.admin(method, path, body)
                assert (answered, list(told)) == (status, ["error"]), (method, path, body, told)
            async with roost.http.post(f"http://127.0.0.1:{roost.admin_port}/admin/replicas", data=b"{") as response:
                assert response.status == 400
            told = (await roost.admin("POST", "/admin/replicas", {"url": "http://u:secret@x:1"}))[1]
            assert "secret" not in told["error"]
            assert list(await roost.replicas()) == [fleet[0].id]
            assert await roost.admin("POST", "/admin/replicas", {"url": fleet[0].url.upper() + "/"}) == (
                200,
                {"id": fleet[0].id, "fleet": "one", "added": False},
            )


async def test_a_replica_that_is_added_but_not_there_harms_nobody() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet[:1]), fleet[:1]) as roost:
        await fleet[1].stop()
        await roost.admin("POST", "/admin/replicas", {"url": fleet[1].url})
        for number in range(4):
            assert (await roost.turn(Conversation(f"x {number}"))).replica == fleet[0].id
        assert not (await roost.replicas())[fleet[1].id]["healthy"]
        await fleet[1].start()
        await roost.knows(fleet)


async def test_decisions_show_every_candidates_cost_and_what_came_true() -> None:
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("explained", header=("x-session-id", "s"))
        for _ in range(3):
            await roost.turn(asked)
            asked.grow()
        await roost.turn(Conversation("other"))
        await roost.idle()
        newest, *older = await roost.decisions()
        assert len(older) == 3
        for decision in (newest, *older):
            assert {each["replica"] for each in decision["candidates"]} == {each.id for each in fleet}
            for cost in decision["candidates"]:
                terms = [value for name, value in cost.items() if name.endswith("_s") and name != "total_s"]
                assert cost["total_s"] == pytest.approx(sum(terms), abs=0.001)
            best = min(decision["candidates"], key=lambda cost: cost["total_s"])
            assert decision["came_true"]["end"] == "complete"
            assert decision["came_true"]["ttft_s"] > 0
            assert best["total_s"] == pytest.approx(decision["candidates"][0]["total_s"], abs=0.002)
            assert decision["candidates"][0]["replica"] == decision["replica"]
        home = older[0]["replica"]
        only = (await roost.admin("GET", f"/admin/decisions?replica={home}&limit=2"))[1]["decisions"]
        assert [each["replica"] for each in only] == [home, home]
        session = older[0]["session"]
        told = (await roost.turn(asked)).session
        for named in (session, session[:12], told):
            assert len((await roost.admin("GET", f"/admin/decisions?session={named}"))[1]["decisions"]) == 4
