"""Clients that write what they like where a name is expected: lines stay lines, metrics stay as many as they are."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.domain.turn import Dialect
from router.telemetry.logs import configure
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, replicas
from tests.integration.roosts import Roost, running, settings_for
from tests.integration.test_auth import ACME, TENANTS, keyed

EVIL = "planted\r\n2026-01-01 INFO forged: yes\x1b[2J\x9b31m\u202e"


@pytest.fixture(params=["json", "text"])
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is written, in the form it is written, at debug level."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    configure("debug", request.param)
    yield text
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    logging.raiseExceptions = True


async def _labels(roost: Roost) -> set[tuple[str, str]]:
    """Every label of every series with every value that it has."""
    families = text_string_to_metric_families(await roost.metrics())
    return {label for family in families for sample in family.samples for label in sample.labels.items()}


async def _attack(roost: Roost, mark: str, key: str | None) -> None:
    """One of everything, none of it like the one before."""
    given = {} if key is None else {"x-api-key": key}
    for dialect in DIALECTS:
        path = PATHS[dialect]
        served = Conversation(mark, dialect, header=("x-session-id", mark.encode().hex()), size_bytes=100)
        await roost.request("POST", path, served.body(), {**served.headers, **given, "user-agent": f"agent {mark[:7]}"})
        served.model = mark
        await roost.request("POST", path, served.body(), {**served.headers, **given})
        await roost.request("POST", f"{path}/{quote(mark)}", b"{}", given)
        await roost.request("POST", path, mark.encode(), given)
        served.model, served.field_given = "m", (mark, mark)
        await roost.request("POST", path, served.body(), {**served.headers, **given})
    await roost.request("GET", f"/v1/models/{quote(mark)}", headers=given)
    await roost.request("GET", f"/v1/responses/{quote(mark)}", headers=given)
    await roost.request("POST", f"/{quote(mark)}?{quote(mark)}", b"{}", given)
    await roost.request("POST", PATHS[Dialect.CHAT], b"{}", {"authorization": f"Bearer {quote(mark)}"})
    for start in (f"{mark.encode().hex().upper()} / HTTP/1.1", f"GET /{quote(mark)} HTTP/9.{len(mark) % 10}"):
        async with Client.to(roost.port) as client:
            client.writer.write(f"{start}\r\nHost: x\r\n{quote(mark)}: {mark.encode().hex()}\r\n\r\n".encode())
            await client.answer()
    async with Client.to(roost.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + mark.encode("utf-8", "replace") + b"\r\n\r\n")
        await client.answer()
    for path in (f"/admin/replicas/{quote(mark, safe='')}/drain", f"/admin/{quote(mark)}"):
        await roost.admin("POST", path, {"url": mark})
    await roost.admin("POST", "/admin/replicas", {"url": mark, mark: mark})
    await roost.admin("GET", f"/admin/decisions?session={quote(mark)}&replica={quote(mark)}")


@pytest.mark.parametrize("with_keys", [False, True])
async def test_lines_stay_lines_and_metrics_as_many_as_they_are(
    stderr: io.StringIO, tmp_path: Path, with_keys: bool
) -> None:
    async with replicas(1) as fleet:
        settings = keyed(fleet, tmp_path) if with_keys else settings_for(fleet)
        key = ACME if with_keys else None
        async with running(settings, fleet) as roost:
            await _attack(roost, EVIL, key)
            await roost.idle()
            before = await _labels(roost)
            for number in range(5):
                await _attack(roost, f"{number} {EVIL}", key)
            await roost.idle()
            assert await _labels(roost) == before
            assert not [value for _, value in before if "planted" in value or "706c616e746564" in value]
    lines = stderr.getvalue().split("\n")
    assert len(lines) > 100
    assert not [line for line in lines if not line.isprintable()]
    assert not [line for line in lines if "planted" in line or line.startswith("2026-01-01")]
    assert not [line for line in lines if any(each in line for entry in TENANTS.values() for each in entry["keys"])]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert not told or {each["level"] for each in told} <= {"debug", "info", "warning"}
