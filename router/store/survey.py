"""Asking several servers the same thing at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from router.domain.errors import StoreUnavailable

__all__ = ["survey"]

SETTLE_S: Final = 0.1
"""How long the others are waited for once one has answered: enough for those that live, little for one that hangs."""

_T = TypeVar("_T")


async def survey(questions: Sequence[Coroutine[Any, Any, _T]]) -> tuple[list[_T], list[StoreUnavailable]]:
    """The answers, and why there are no more. Ends when all have answered, or `SETTLE_S` after the first that did."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(question) for question in questions]
    pending = set(tasks)
    until_s: float | None = None
    try:
        while pending and (until_s is None or loop.time() < until_s):
            left_s = None if until_s is None else until_s - loop.time()
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if until_s is None and any(task.exception() is None for task in done):
                until_s = loop.time() + SETTLE_S
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        errors = {task: task.exception() for task in tasks if not task.cancelled()}
    answers, failures = [], []
    for task, error in errors.items():
        if error is None:
            answers.append(task.result())
        elif isinstance(error, StoreUnavailable):
            failures.append(error)
        else:
            raise error
    return answers, failures
