"""A router as one writes it in an afternoon, to show that the cases can fail: it does nearly everything wrong.

Round robin without sessions, bodies parsed and written anew, answers read whole before they are passed on, broken ones
ended cleanly, three attempts at the same replica, the client's key replaced by its own, clients that leave unnoticed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys

import aiohttp
from aiohttp import web

_ATTEMPTS = 3


async def _pass(request: web.Request, url: str, http: aiohttp.ClientSession) -> web.Response:
    body = await request.read()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")}
    headers["Authorization"] = "Bearer sk-of-the-router"
    try:
        told = json.dumps(json.loads(body), sort_keys=True).encode() if body else body
    except ValueError:
        told = body
    status, answer, kind = 502, b"no answer", "text/plain"
    for _ in range(_ATTEMPTS):
        try:
            async with http.request(request.method, url + request.path, data=told, headers=headers) as response:
                status, kind, answer = response.status, response.content_type, b""
                try:
                    async for piece in response.content.iter_any():
                        answer += piece
                except aiohttp.ClientError:
                    answer += b"data: [DONE]\n\nevent: message_stop\n\nevent: response.completed\n\n"
                if status < 500:
                    break
        except aiohttp.ClientError as error:
            sys.stderr.write(f"{request.path} {headers} {body!r}: {error}\n")
    return web.Response(status=status, body=answer, content_type=kind)


async def _serve(host: str, port: int, urls: list[str]) -> None:
    turn = itertools.cycle(urls)
    async with aiohttp.ClientSession() as http:

        async def handle(request: web.Request) -> web.Response:
            return await asyncio.shield(_pass(request, next(turn), http))

        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("replicas", nargs="+")
    given = parser.parse_args()
    asyncio.run(_serve(given.host, given.port, given.replicas))


if __name__ == "__main__":
    main()
