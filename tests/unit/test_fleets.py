"""Which fleet serves a model: configured names, what replicas serve, without a LoRA suffix, then who takes any."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.domain.errors import MalformedRequest, UnknownModel
from router.domain.shared import Member
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.fleets import Fleets
from router.store.memory import MemoryStore
from tests.fakes import UP, FakeClock, FakeProber


async def fleet(name: str, *configured: str, serves: tuple[str, ...] = ()) -> FleetRuntime:
    """A fleet of one replica that says it serves these models."""
    clock = FakeClock()
    store = MemoryStore(clock)
    await store.put_member(name, Member("r:1", "http://r:1", "admin", models=serves))
    made = FleetRuntime(FleetSpec(name, models=configured), store, FakeProber(), clock)
    await made.refresh()
    return made


async def test_a_configured_name_comes_before_what_replicas_serve() -> None:
    fleets = Fleets([await fleet("says", serves=("m",)), await fleet("set", "m")])
    assert fleets.serving("m").name == "set"


async def test_what_replicas_serve_is_found() -> None:
    fleets = Fleets([await fleet("a", serves=("m", "n")), await fleet("b", serves=("o",))])
    assert [fleets.serving(model).name for model in ("m", "n", "o")] == ["a", "a", "b"]


async def test_a_fleet_with_configured_names_serves_no_others() -> None:
    fleets = Fleets([await fleet("a", "alias", serves=("m",)), await fleet("b", serves=("o",))])
    with pytest.raises(UnknownModel):
        fleets.serving("m")


async def test_a_whole_name_comes_before_one_without_its_lora_suffix() -> None:
    fleets = Fleets([await fleet("base", "m"), await fleet("adapted", serves=("m:lora",))])
    assert fleets.serving("m:lora").name == "adapted"
    assert fleets.serving("m:other").name == "base"
    assert fleets.serving("m").name == "base"


async def test_a_fleet_that_takes_any_is_the_last_to_be_asked() -> None:
    fleets = Fleets([await fleet("any", "*"), await fleet("b", "o"), await fleet("c", serves=("p",))])
    assert [fleets.serving(model).name for model in ("o", "p", "q", "p:lora")] == ["b", "c", "any", "c"]


async def test_among_fleets_that_take_any_the_one_that_serves_the_model_is_asked() -> None:
    fleets = Fleets([await fleet("any", "*"), await fleet("other", "*", serves=("q",))])
    assert fleets.serving("q").name == "other"


async def test_the_only_fleet_takes_all_while_it_does_not_know_its_models() -> None:
    young = Fleets([await fleet("only")])
    assert young.serving("anything").name == "only"
    grown = Fleets([await fleet("only", serves=("m",))])
    with pytest.raises(UnknownModel, match=r"served: m$"):
        grown.serving("anything")
    two = Fleets([await fleet("one"), await fleet("two")])
    with pytest.raises(UnknownModel, match="nothing yet"):
        two.serving("anything")


async def test_no_model_is_needed_where_there_is_one_fleet() -> None:
    assert Fleets([await fleet("only", "m")]).serving(None).name == "only"
    with pytest.raises(MalformedRequest, match="served here: m, n"):
        Fleets([await fleet("one", "m"), await fleet("two", "n")]).serving(None)


async def test_an_unknown_name_is_shown_cut_and_printable() -> None:
    fleets = Fleets([await fleet("only", "m")])
    with pytest.raises(UnknownModel) as raised:
        fleets.serving("x\r\n\u202e" + "y" * 10_000)
    assert "x???yyy" in str(raised.value)
    assert len(str(raised.value)) < 200
    with pytest.raises(UnknownModel):
        fleets.serving("")


async def test_fleets_are_found_by_name_and_ready_when_one_is() -> None:
    one, two = await fleet("one", "m"), await fleet("two", "n")
    fleets = Fleets([one, two])
    assert fleets.named("two") is two
    assert fleets.named("three") is None
    assert fleets.first() is one
    assert list(fleets) == [one, two]
    assert not fleets.ready()
    two.observed("r:1", UP)
    assert fleets.ready()


async def test_all_fleets_run_until_cancelled() -> None:
    one, two = await fleet("one"), await fleet("two")
    for each in (one, two):
        each.spec = replace(each.spec, probe_interval_s=3_600.0)
    running = asyncio.create_task(Fleets([one, two]).run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert one.ready()
    assert two.ready()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
