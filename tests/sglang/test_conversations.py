"""Growing conversations keep their KV under `roost`, and pay for it again under `round_robin`.

Two scenes, each played under both policies, by a fresh Roost, on servers with empty caches, word by word the same:

- `long`: one keyless chat conversation of 30 turns;
- `four`: four conversations at once, in four dialects, two of them keyless. One server's KV holds two of them when
  they are grown, not four: spread over everything each is there twice, and the fleet holds half as much.

Cached tokens are the engine's own words in each reply; so are the tokens it had to compute.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.sglang.client import Answer, Conversation, new_client
from tests.sglang.conftest import StartRoost
from tests.sglang.dialects import CHAT, GENERATE, MESSAGES, RESPONSES
from tests.sglang.front import Roost
from tests.sglang.servers import CAPACITY_TOKENS, PAGE_TOKENS, Pair, Server

LONG_TURNS = 30
FOUR_TURNS = 10


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as its reply told."""

    conversation: str
    dialect: str
    replica: str
    reason: str
    prompt: int
    cached: int
    before: int
    """Prompt tokens of the turn before; 0: the first."""
    decision: dict[str, Any]

    @property
    def found_all(self) -> bool:
        """The whole previous prompt was still there, but for a page that it did not fill."""
        return self.cached >= self.before - PAGE_TOKENS

    @property
    def found_half(self) -> bool:
        """Most of the previous prompt was there."""
        return self.cached >= self.before / 2


@dataclass(frozen=True, slots=True)
class Played:
    """A scene under one policy."""

    turns: tuple[Turn, ...]
    prefilled_tokens: int
    """Prompt tokens that the two servers computed for it, by their own counters."""
    text_bytes: dict[str, int]
    """Roles and texts of each conversation's last prompt."""
    replicas: dict[str, dict[str, Any]]
    """GET /admin/replicas at the end."""

    @property
    def later(self) -> tuple[Turn, ...]:
        """Turns that have one before them."""
        return tuple(turn for turn in self.turns if turn.before)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of previous prompts that were not found and had to be computed again."""
        return sum(max(0, turn.before - turn.cached) for turn in self.later)

    def homes(self, conversation: str) -> set[str]:
        """The replicas that served it."""
        return {turn.replica for turn in self.turns if turn.conversation == conversation}


@dataclass(frozen=True, slots=True)
class Scenes:
    """Both scenes under one policy."""

    long: Played
    four: Played


Scene = Callable[[aiohttp.ClientSession, str], Awaitable[list[Conversation]]]


async def _long(http: aiohttp.ClientSession, url: str) -> list[Conversation]:
    conversation = Conversation.new("long", CHAT, system_bytes=800)
    for _ in range(LONG_TURNS):
        await conversation.turn(http, url, user_bytes=130)
    return [conversation]


async def _four(http: aiohttp.ClientSession, url: str) -> list[Conversation]:
    conversations = [
        Conversation.new("chat", CHAT, 2000, session="an agent of the first kind"),
        Conversation.new("messages", MESSAGES, 2000),
        Conversation.new("responses", RESPONSES, 2000, session="an agent of the third kind"),
        Conversation.new("generate", GENERATE, 2000),
    ]
    dice = random.Random("interleaved")
    for _ in range(FOUR_TURNS):
        await asyncio.gather(*(each.turn(http, url, 200) for each in dice.sample(conversations, len(conversations))))
    return conversations


def _told(roost: Roost, conversation: Conversation) -> list[Turn]:
    decisions = roost.decisions(conversation.answers[0].session)
    assert len(decisions) == len(conversation.answers)
    before: list[Answer | None] = [None, *conversation.answers[:-1]]
    return [
        Turn(
            conversation=conversation.name,
            dialect=conversation.dialect.name,
            replica=answer.replica,
            reason=answer.reason,
            prompt=answer.reply.prompt_tokens or 0,
            cached=answer.reply.cached_tokens or 0,
            before=0 if last is None else last.reply.prompt_tokens or 0,
            decision=decision,
        )
        for answer, last, decision in zip(conversation.answers, before, decisions, strict=True)
    ]


def _text_bytes(conversation: Conversation) -> int:
    """Text of the last prompt: what was said, and by whom."""
    asked = sum(len("user") + len(user.encode()) for user, _ in conversation.history)
    replies = conversation.history[:-1]
    answered = sum(
        len("assistant") + len(answer.reply.text.encode()) for answer in conversation.answers[: len(replies)]
    )
    return len("system") + len(conversation.system.encode()) + asked + answered


def _play(roost: Roost, servers: tuple[Server, ...], scene: Scene) -> Played:
    for server in servers:
        server.flush()
    prefilled = sum(server.prefilled_tokens() for server in servers)

    async def run() -> list[Conversation]:
        async with new_client() as http:
            return await scene(http, roost.url)

    conversations = asyncio.run(run())
    for conversation in conversations:
        for answer in conversation.answers:
            assert answer.status == 200, answer.body
            assert answer.reply.ended, "every stream came to its terminal event"
            assert not answer.broken
    return Played(
        turns=tuple(turn for conversation in conversations for turn in _told(roost, conversation)),
        prefilled_tokens=sum(server.prefilled_tokens() for server in servers) - prefilled,
        text_bytes={conversation.name: _text_bytes(conversation) for conversation in conversations},
        replicas=roost.replicas(),
    )


def _scenes(pair: Pair, start_roost: StartRoost, policy: str) -> Scenes:
    servers = pair.ensure()
    played = []
    for scene in (_long, _four):
        with start_roost(servers, "--policy", policy) as roost:
            played.append(_play(roost, servers, scene))
    return Scenes(*played)


def _figures(played: Played) -> dict[str, Any]:
    later = played.later
    cached = sum(turn.cached for turn in played.turns)
    return {
        "turns": len(played.turns),
        "turns with one before": len(later),
        "… that found all of its prompt": sum(turn.found_all for turn in later),
        "… that found less than half": sum(not turn.found_half for turn in later),
        "prompt tokens": sum(turn.prompt for turn in played.turns),
        "cached tokens": cached,
        "cached share": round(cached / sum(turn.prompt for turn in played.turns), 3),
        "computed again, tokens": played.recomputed_tokens,
        "prefilled by the engines' counters": played.prefilled_tokens,
        "replicas per conversation": max(len(played.homes(name)) for name in played.text_bytes),
        "prompt, cached, predicted": {
            name: [
                [turn.prompt, turn.cached, turn.decision["predicted_cached_tokens"]]
                for turn in played.turns
                if turn.conversation == name
            ]
            for name in played.text_bytes
        },
    }


def _note(figures: dict[str, Any], policy: str, scenes: Scenes) -> None:
    for name, played in (("one conversation", scenes.long), ("four conversations", scenes.four)):
        figures.setdefault(name, {})[policy] = _figures(played)


@pytest.fixture(scope="module")
def at_home(pair: Pair, start_roost: StartRoost, figures: dict[str, Any]) -> Scenes:
    """Both scenes under `roost`."""
    scenes = _scenes(pair, start_roost, "roost")
    _note(figures, "roost", scenes)
    return scenes


@pytest.fixture(scope="module")
def dealt_out(pair: Pair, start_roost: StartRoost, figures: dict[str, Any]) -> Scenes:
    """Both scenes under `round_robin`."""
    scenes = _scenes(pair, start_roost, "round_robin")
    _note(figures, "round_robin", scenes)
    return scenes


@pytest.mark.parametrize("scene", ["long", "four"])
def test_under_roost_every_later_turn_finds_its_previous_prompt(at_home: Scenes, scene: str) -> None:
    """Every turn after the first finds all of the previous prompt's KV, to the page."""
    later = getattr(at_home, scene).later
    assert [(t.conversation, t.before, t.cached) for t in later if not t.found_all] == []


@pytest.mark.parametrize("scene", ["long", "four"])
def test_under_roost_a_conversation_stays_on_one_replica(at_home: Scenes, scene: str) -> None:
    """Whether it is known by a header or by its prompt only, in every dialect."""
    played: Played = getattr(at_home, scene)
    for conversation in played.text_bytes:
        assert len(played.homes(conversation)) == 1
        reasons = [turn.reason for turn in played.turns if turn.conversation == conversation]
        assert reasons == ["new"] + ["home"] * (len(reasons) - 1)


def test_under_roost_four_conversations_share_the_two_replicas(at_home: Scenes) -> None:
    """Two each: a replica's KV would not hold three."""
    homes = [next(iter(at_home.four.homes(name))) for name in at_home.four.text_bytes]
    assert sorted(map(homes.count, set(homes))) == [2, 2]


def test_under_roost_what_it_predicts_comes_true(at_home: Scenes) -> None:
    """Predicted and actual cached tokens of warm turns differ by little.

    By two pages: one that was not full, one for the tokens of the reply that were the same again. Raw prompts
    (`generate`) are known by whole KiB of their text, so there the end of the previous prompt counts as new.
    """
    for turn in (*at_home.long.later, *at_home.four.later):
        predicted = turn.decision["predicted_cached_tokens"]
        correction = turn.before // 50  # a correction factor may have learned from the pages
        assert abs(predicted - turn.cached) <= 2 * PAGE_TOKENS + correction, turn


def test_decisions_hold_what_the_replies_said(at_home: Scenes) -> None:
    """The usage in each decision's record is the usage that the client read in its reply."""
    for turn in (*at_home.long.turns, *at_home.four.turns):
        true = turn.decision["came_true"]
        assert (true["end"], true["status"]) == ("complete", 200)
        assert (true["prompt_tokens"], true["cached_tokens"] or 0) == (turn.prompt, turn.cached)
        assert (turn.decision["dialect"], turn.decision["replica"]) == (turn.dialect, turn.replica)


def test_under_roost_capacity_and_rates_are_learned(at_home: Scenes, pair: Pair, figures: dict[str, Any]) -> None:
    """Capacity is what the server says; tokens per byte come near the truth within 30 turns, from an assumed 0.25."""
    played = at_home.long
    for server in pair.servers:
        capacity = played.replicas[server.id]["capacity"]["device_tokens"]
        assert capacity == server.info()["max_total_num_tokens"] == CAPACITY_TOKENS
    true = played.turns[-1].prompt / played.text_bytes["long"]
    learned = next(iter(played.replicas.values()))["rates"]["tokens_per_byte"]
    figures["tokens per byte"] = {"assumed": 0.25, "learned": round(learned, 3), "true": round(true, 3)}
    assert learned == pytest.approx(true, rel=0.1)


def test_under_round_robin_a_turn_elsewhere_lacks_its_previous_prompt(dealt_out: Scenes) -> None:
    """Every turn of the one conversation goes to the other replica than the one before, and finds all of that prompt
    never; the four meet the same replica again by chance only, and then it may have had to evict them."""
    assert [turn for turn in dealt_out.long.later if turn.found_all] == []
    four = dealt_out.four
    lacking = [turn for turn in four.later if not turn.found_all]
    assert len(lacking) >= len(four.later) / 4
    assert any(not turn.found_half for turn in lacking)
    for conversation in four.text_bytes:
        assert len(four.homes(conversation)) == 2


def test_under_round_robin_more_must_be_computed(at_home: Scenes, dealt_out: Scenes) -> None:
    """The same words cost the engines about twice the prefill for one conversation, which both now compute in full; and
    more than twice where the fleet's KV no longer holds every conversation.
    """
    assert dealt_out.long.prefilled_tokens > 1.7 * at_home.long.prefilled_tokens
    assert dealt_out.four.prefilled_tokens > 2 * at_home.four.prefilled_tokens
    assert at_home.long.recomputed_tokens <= PAGE_TOKENS * len(at_home.long.later)
    assert at_home.four.recomputed_tokens <= PAGE_TOKENS * len(at_home.four.later)
