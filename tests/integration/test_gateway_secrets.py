"""What clients say stays out of logs, metrics and the admin API; and the metrics are sound."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from router.domain.turn import Dialect
from router.telemetry.logs import _Json
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Visit, replicas
from tests.integration.roosts import running, settings_for

MARKERS = ("planted-prompt", "planted-key", "planted-session", "planted-field", "planted-reply", "planted-target")


@contextmanager
def written() -> Iterator[io.StringIO]:
    """Everything the process logs, at debug level, in the form it is written."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(_Json())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


async def test_no_prompt_no_key_and_no_raw_id_is_written_anywhere() -> None:
    """Good turns, refused ones, broken ones, bad HTTP: planted words are looked for in all that Roost shows."""

    async def tells(visit: Visit) -> None:
        await visit.answer(500, b'{"error":"planted-reply"}', [("X-Detail", "planted-reply")])

    async def dies(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(b"data: planted-reply\n\n")
        visit.reset()

    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        with written() as log:
            healthy = fleet[0].script
            for script in (healthy, tells, dies):
                for replica in fleet:
                    replica.script = script
                for dialect in DIALECTS:
                    asked = Conversation(
                        "planted-prompt",
                        dialect,
                        system="planted-prompt",
                        header=("x-claude-code-session-id", "planted-session"),
                        key="planted-key",
                    )
                    await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
                    asked.header, asked.field_given = None, ("user", "planted-field")
                    await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
                    asked.model = "unserved"
                    await roost.request("POST", PATHS[dialect] + "/planted-target", asked.body(), asked.headers)
                    await roost.request("POST", PATHS[dialect], b'{"planted-prompt" planted', asked.headers)
            async with Client.to(roost.port) as client:
                client.writer.write(b"GET /planted-target HTTP/9\r\nplanted-key planted-prompt\r\n\r\n")
                await client.answer()
            await roost.idle()
            shown = json.dumps(await roost.decisions()) + json.dumps(await roost.replicas()) + await roost.metrics()
        lines = log.getvalue().splitlines()
        assert sum('"message":"turn"' in line for line in lines) >= 30
        assert not [line for line in lines if any(marker in line for marker in MARKERS)]
        assert not [marker for marker in MARKERS if marker in shown]


async def test_one_line_a_turn_says_what_became_of_it() -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        with written() as log:
            answer = await roost.turn(Conversation("told", header=("x-session-id", "s")))
            await roost.idle()
        (line,) = [each for each in map(json.loads, log.getvalue().splitlines()) if each["message"] == "turn"]
        assert line["replica"] == fleet[0].id
        assert (line["reason"], line["end"], line["status"], line["dialect"]) == ("new", "complete", 200, "chat")
        assert line["source"] == "x-session-id"
        assert answer.session.startswith(line["session"])
        assert line["output_tokens"] == 2
        assert line["prompt_tokens"] > 0


async def test_metrics_are_sound_and_add_up() -> None:
    """Every family parses; turns, tokens and refusals are counted once; nothing is in flight at the end."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        for number in range(10):
            await roost.turn(
                Conversation(f"counted {number}", DIALECTS[number % 5], header=("x-session-id", str(number)))
            )
        await roost.request("POST", PATHS[Dialect.MESSAGES], b"not json")
        await roost.idle()
        families = {family.name: family for family in text_string_to_metric_families(await roost.metrics())}
        assert all(family.documentation for family in families.values())
        turns = families["roost_turns"].samples
        assert sum(sample.value for sample in turns if sample.name == "roost_turns_total") == 10
        assert {sample.labels["end"] for sample in turns} == {"complete"}
        refused = [sample for sample in families["roost_requests_refused"].samples if sample.name.endswith("_total")]
        assert [(each.labels["dialect"], each.labels["code"], each.value) for each in refused] == [
            ("messages", "invalid_request", 1.0)
        ]
        assert await roost.gauge("roost_in_flight") == {replica.id: 0.0 for replica in fleet}
        output = families["roost_output_tokens"].samples
        assert sum(sample.value for sample in output if sample.name.endswith("_total")) == 20
