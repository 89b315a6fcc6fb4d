"""Who may ask the admin API what: tokens that read or change, and nothing for web pages of others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from router.api.door import Door
from router.main import Listeners, bind, serve
from router.settings import Admin
from tests.integration.relay_rig import Client
from tests.integration.replicas import PATIENCE_S, Replica, replicas
from tests.integration.roosts import running, settings_for
from tests.integration.supervised import supervised

READ, WRITE = "reading-token", "writing-token"
READS = [("GET", "/admin/replicas"), ("GET", "/admin/decisions"), ("GET", "/metrics"), ("HEAD", "/metrics")]
CHANGES = [
    ("POST", "/admin/replicas"),
    ("POST", "/admin/replicas/r/drain"),
    ("POST", "/admin/replicas/r/cordon"),
    ("POST", "/admin/replicas/r/undrain"),
    ("DELETE", "/admin/replicas/r"),
    ("PUT", "/admin/anything/new"),
    ("POST", "/metrics"),
    ("POST", "/livez"),
]
OPEN = [("GET", "/livez"), ("GET", "/readyz")]


def token_files(folder: Path) -> Admin:
    """Tokens in files, the reading one about to be replaced."""
    (folder / "read").write_text(f"old-{READ}\n{READ}\n")
    (folder / "write").write_text(WRITE)
    return Admin(read_token_file=str(folder / "read"), write_token_file=str(folder / "write"))


async def asked(
    port: int, method: str, path: str, token: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    given = dict(headers or {})
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"http://127.0.0.1:{port}{path}", headers=given) as response,
    ):
        return response.status, dict(response.headers), await response.read()


@asynccontextmanager
async def _with_tokens(fleet: list[Replica], admin: Admin) -> AsyncIterator[int]:
    """A router whose admin API asks for tokens: its admin port. The rig's own questions go past the door."""
    settings = settings_for(fleet, admin=admin)
    public, listener = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    stop, listening = asyncio.Event(), asyncio.Event()
    with public, listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(
            serve(settings, Listeners(public, listener), stop, store_url=None, announce=listening.set)
        )
        await listening.wait()
        async with asyncio.timeout(PATIENCE_S):
            while (await asked(port, "GET", "/readyz"))[0] != 200:  # noqa: ASYNC110 (looking is all one can do)
                await asyncio.sleep(0.01)
        try:
            yield port
        finally:
            stop.set()
            await serving


async def _doors(port: int) -> None:
    """The whole table of methods and tokens."""
    for method, path in OPEN:
        assert (await asked(port, method, path))[0] == 200
    for method, path in READS + CHANGES:
        for wrong in (None, "", "wrong", READ[:-1], READ + "x", f"{READ} {WRITE}"):
            status, headers, body = await asked(port, method, path, wrong)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), (method, path, wrong)
            if method != "HEAD":
                assert "token" in json.loads(body)["error"]
    for method, path in READS:
        for token in (READ, f"old-{READ}", WRITE):
            assert (await asked(port, method, path, token))[0] == 200, (method, path, token)
    for method, path in CHANGES:
        status, _, body = await asked(port, method, path, READ)
        assert status == 403, (method, path)
        assert "read only" in json.loads(body)["error"]
        assert (await asked(port, method, path, WRITE))[0] not in (401, 403), (method, path)


async def test_reading_needs_either_token_and_changing_the_write_token(tmp_path: Path) -> None:
    """Whatever the path, also one that is not there; /livez and /readyz are open."""
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        assert (await asked(roost.admin_port, "GET", "/admin/replicas"))[0] == 200
    async with replicas(1) as fleet, _with_tokens(fleet, token_files(tmp_path)) as port:
        await _doors(port)


async def test_several_workers_have_the_same_door(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    admin = {**token_files(tmp_path).model_dump(mode="json", exclude_none=True), "port": 0}
    async with replicas(1) as fleet, supervised(tmp_path_factory.mktemp("w"), fleet, admin=admin) as roost:
        await _doors(roost.admin_port)
        for target, status in (("/admin/decisions?limit=0&replica=a%2Fb", 200), ("/livez/../admin/replicas", 404)):
            asked_as = f"GET http://evil.example{target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {READ}\r\n\r\n"
            async with Client.to(roost.admin_port) as client:
                client.writer.write(asked_as.encode())
                assert (await client.answer()).status == status


async def test_with_a_read_token_alone_nobody_changes_anything() -> None:
    async with replicas(1) as fleet, _with_tokens(fleet, Admin(read_token=READ)) as port:
        assert (await asked(port, "GET", "/admin/replicas", READ))[0] == 200
        assert (await asked(port, "POST", "/admin/replicas/r/drain", READ))[0] == 403


async def test_with_a_write_token_alone_it_reads_too_and_nobody_else() -> None:
    async with replicas(1) as fleet, _with_tokens(fleet, Admin(write_token=WRITE)) as port:
        assert (await asked(port, "GET", "/admin/replicas", WRITE))[0] == 200
        assert (await asked(port, "GET", "/admin/replicas"))[0] == 401


# --- browsers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_a_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    """A form needs no permission of the browser to be posted anywhere, 127.0.0.1 included."""
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        path = f"/admin/replicas/{fleet[0].id}/drain"
        assert (await asked(roost.admin_port, "POST", path, headers=headers))[0] == 403
        assert (await roost.replicas())[fleet[0].id]["standing"] == "serving"
        own = {"Origin": f"http://127.0.0.1:{roost.admin_port}", "Sec-Fetch-Site": "same-origin"}
        assert (await asked(roost.admin_port, "POST", path, headers=own))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example"]
)
async def test_a_name_that_is_made_to_resolve_to_loopback_opens_nothing(host: str) -> None:
    """DNS rebinding: by then the page is of the same site, but its name is still in Host."""
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        for method, path in READS[:3] + CHANGES:
            assert (await asked(roost.admin_port, method, path, headers={"Host": host}))[0] == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9090", "localhost.", "127.0.0.1", "[::1]:9090", "10.1.2.3:9090"]
)
async def test_loopback_under_its_own_names_is_open(host: str) -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        assert (await asked(roost.admin_port, "GET", "/admin/replicas", headers={"Host": host}))[0] == 200


def test_who_says_unprotected_or_has_a_token_may_use_any_name() -> None:
    def refusal(door: Door, **headers: str) -> Any:
        return door.refusal(make_mocked_request("GET", "/admin/replicas", headers=headers))

    assert refusal(Door(own_names=None), Host="roost-admin.svc") is None
    door = Door((READ,), own_names=frozenset({"localhost"}))
    assert refusal(door, Host="roost-admin.svc", Authorization=f"Bearer {READ}") is None
    assert refusal(door, Host="roost-admin.svc").status == 401
    assert refusal(door, Host="localhost", Authorization=f"Basic {READ}").status == 401


@pytest.mark.parametrize("content", ["", "\n\n", "a b\n", "caf\xe9\n"])
async def test_a_file_of_tokens_that_cannot_be_used_ends_the_start(tmp_path: Path, content: str) -> None:
    """With a line that names the setting and shows nothing of the file: an empty one would let everybody in."""
    file = tmp_path / "read"
    file.write_text(content)
    for settings in (
        settings_for([], admin=Admin(read_token_file=str(file))),
        settings_for([], admin=Admin(write_token_file=str(tmp_path / "absent"))),
    ):
        with pytest.raises(OSError, match=r"^admin\.(read|write)_token_file: ") as caught:
            async with running(settings):
                pytest.fail("it started")
        assert "a b" not in str(caught.value)
