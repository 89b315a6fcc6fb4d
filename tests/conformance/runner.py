"""Runs cases one after another, those that only wait beside them, and keeps what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tests.conformance.case import Case, Failed, NotApplicable, Verdict
from tests.conformance.dialects import DIALECTS, Dialect, ask
from tests.conformance.rig import Pool, Rig, Target, new_mark

_WAITING_AT_ONCE = 3
"""Cases that only wait, run beside each other."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    case: Case
    verdict: Verdict
    said: str
    """What was seen, or why it does not apply; empty for a pass."""
    seconds: float


async def discover(target: Target) -> None:
    """Which dialects the router serves: a plain request of each; 404, 405 and 501 mean that it does not."""
    async with AsyncExitStack() as stack:
        stage = await target.stage(1, 1, "sessions", {}, stack)
        found = set()
        for dialect in DIALECTS:
            body = ask(dialect, [f"hello {new_mark()}"], stream=False)
            answer = await stage.router.request("POST", dialect.path, body)
            if answer.status in (404, 405, 501):
                target.without[dialect] = f"{dialect.path}: {answer.status}"
            else:
                found.add(dialect)
    target.dialects = frozenset(found)


async def run(target: Target, cases: Sequence[Case], tell: Callable[[Result], None]) -> list[Result]:
    """Every case's result, in the order of the cases."""
    pool: Pool = {}
    results: dict[str, Result] = {}
    gate = asyncio.Semaphore(_WAITING_AT_ONCE)

    async def one(case: Case) -> None:
        result = await _try(target, case, pool)
        results[case.id] = result
        tell(result)

    async def beside(case: Case) -> None:
        async with gate:
            await one(case)

    try:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                if case.waits:
                    group.create_task(beside(case))
            for case in cases:
                if not case.waits:
                    await one(case)
    finally:
        for _, stack in pool.values():
            await stack.aclose()
    return [results[case.id] for case in cases]


def _missing(target: Target, case: Case) -> str:
    lacking = case.needs - target.adapter.can
    if lacking:
        return f"it does not {min(lacking)}"
    if case.dialect is not None and case.dialect not in target.dialects:
        return f"it does not serve {target.without.get(case.dialect, case.dialect)}"
    return next((why for name, why in target.adapter.loses.items() if case.matches([name])), "")


async def _try(target: Target, case: Case, pool: Pool) -> Result:
    started = time.monotonic()
    why = _missing(target, case)
    if why:
        return Result(case, Verdict.NA, why, 0.0)
    rig = Rig(target, case, pool)
    verdict, said = Verdict.FAIL, "?"
    try:
        async with asyncio.timeout(case.limit_s):
            await case.run(rig)
        verdict, said = Verdict.PASS, ""
    except NotApplicable as found:
        verdict, said = Verdict.NA, str(found)
    except Failed as found:
        said = str(found)
    except TimeoutError:
        said = f"not done within {case.limit_s:g} s"
    except Exception as error:  # noqa: BLE001 (whatever a router does to a client must not end the run)
        said = f"the client saw {type(error).__name__}: {error}"
    finally:
        await rig.close(failed=verdict is not Verdict.PASS)
    return Result(case, verdict, " ".join(said.split()), time.monotonic() - started)


__all__ = ["Dialect", "Result", "discover", "run"]
