"""The simulated engine against the real one: the same requests find the same cached tokens, turn by turn.

Prompts go to `/generate` as token ids, which both take as they are: no tokenizer stands between. The real model's
output differs from the simulated one; the next prompt repeats whichever each engine said, so positions agree.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from simulations import profiles
from simulations.engine_server.server import Engine
from tests.sglang.client import new_client
from tests.sglang.servers import CAPACITY_TOKENS, MODEL, PAGE_TOKENS, Pair

IDS = range(10, 500)
"""Token ids that the tiny model knows and that mean nothing special."""


@dataclass
class Story:
    """A conversation in token ids, which each engine continues with its own answers."""

    real: list[int] = field(default_factory=list)
    simulated: list[int] = field(default_factory=list)

    def add(self, ids: list[int]) -> None:
        self.real += ids
        self.simulated += ids

    def fork(self) -> Story:
        return Story(list(self.real), list(self.simulated))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn at both engines."""

    what: str
    prompt: int
    real: int
    """Cached tokens."""
    simulated: int


class Duel:
    """Asks both engines the same."""

    def __init__(self, real: str, simulated: str, http: aiohttp.ClientSession) -> None:
        self.urls = {"real": real, "simulated": simulated}
        self.http = http
        self.dice = random.Random("parity")
        self.turns: list[Turn] = []

    def some(self, count: int) -> list[int]:
        return self.dice.choices(IDS, k=count)

    async def turn(self, what: str, story: Story, output: int) -> None:
        """Ask, remember what was cached, and make the answers part of the story."""
        cached = {}
        prompt = len(story.real)
        for name, url in self.urls.items():
            ids: list[int] = getattr(story, name)
            sampling = {"max_new_tokens": output, "ignore_eos": True, "temperature": 0}
            body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling, "stream": False}
            async with self.http.post(url + "/generate", json=body) as response:
                assert response.status == 200, await response.text()
                reply = await response.json()
            assert reply["meta_info"]["prompt_tokens"] == prompt
            assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) == output
            cached[name] = reply["meta_info"]["cached_tokens"]
            ids += reply["output_ids"]
        self.turns.append(Turn(what, prompt, cached["real"], cached["simulated"]))


@pytest.fixture
async def duel(pair: Pair) -> AsyncIterator[Duel]:
    """A real server with an empty cache, and the simulated one of the same size."""
    real, _ = pair.ensure()
    engine = Engine(
        profiles.load("cpu-tiny", device_tokens=CAPACITY_TOKENS, page_tokens=PAGE_TOKENS), model=MODEL, time_scale=50
    )
    await engine.start()
    try:
        async with new_client() as http:
            yield Duel(real.url, engine.url, http)
    finally:
        await engine.stop()


async def test_the_same_requests_find_the_same_cached_tokens(duel: Duel, figures: dict[str, Any]) -> None:
    """Growth, repetition, a fork, a rewind, lengths at page borders, eviction of the longest unused."""
    story = Story()
    story.add(duel.some(211))
    await duel.turn("first", story, 7)
    for number in range(6):
        story.add(duel.some((50, 16, 1, 9, 32, 3)[number]))
        await duel.turn(f"grows {number}", story, (5, 16, 1, 17, 2, 30)[number])
    branch = story.fork()
    branch.add(duel.some(40))
    await duel.turn("fork", branch, 4)
    story.add(duel.some(40))
    await duel.turn("beside the fork", story, 4)
    rewound = Story(story.real[:160], story.simulated[:160])
    await duel.turn("rewound to a page", rewound, 4)
    rewound = Story(story.real[:161], story.simulated[:161])
    await duel.turn("rewound past a page", rewound, 4)
    twice = Story(story.real[:200], story.simulated[:200])
    await duel.turn("once more", twice.fork(), 1)
    await duel.turn("and again", twice.fork(), 1)
    # More than fits: six stories of 2,600 tokens in 11,264, then each again, the latest first.
    others = [Story() for _ in range(6)]
    for number, other in enumerate(others):
        other.add(duel.some(2600))
        await duel.turn(f"fills {number}", other, 2)
    for number, other in reversed(list(enumerate(others))):
        other.add(duel.some(20))
        await duel.turn(f"returns {number}", other, 2)
    figures["cached tokens, real and simulated"] = {
        "prompt": {each.what: each.prompt for each in duel.turns},
        "real": {each.what: each.real for each in duel.turns},
        "simulated": {each.what: each.simulated for each in duel.turns},
    }
    assert [each.simulated for each in duel.turns] == [each.real for each in duel.turns]
