"""`python -m tests.conformance`: try a router by the rules. Without a command it is Roost."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.conformance import cases
from tests.conformance.adapters import ADAPTERS, Adapter, plain, roost
from tests.conformance.case import CASES, Case, Failed, Verdict
from tests.conformance.report import document, side_by_side, summary, table, write_json
from tests.conformance.rig import Target
from tests.conformance.runner import Result, discover, run

_ABOUT = """Rules for routers in front of inference replicas, tried on any router with mock replicas."""
_COMMAND = """command that starts the router; {listen} (or {host} and {port}) is where it must listen, {replicas} the
root URLs of its replicas ({replicas:,} with commas, {replicas:--flag} with a flag before each), {redis} the URL of a
Redis that it may share with another router, {admin_port} a second free port"""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.conformance", description=_ABOUT)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--router", metavar="COMMAND", help=_COMMAND.replace("%", "%%"))
    which.add_argument("--adapter", choices=sorted(ADAPTERS), help="a router that the suite knows (default: roost)")
    which.add_argument("--side-by-side", nargs="+", type=Path, metavar="FILE", help="print runs' JSON as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="a case, a subject or a glob")
    parser.add_argument("--skip", action="append", default=[], metavar="CASE", help="the same, left out")
    parser.add_argument("--name", default="router", help="what to call the router of --router")
    parser.add_argument("--session-header", default="", metavar="NAME", help="header by which it keeps sessions")
    parser.add_argument("--keyless", action="store_true", help="it keeps conversations that no header names")
    parser.add_argument("--metrics", action="store_true", help="it tells metrics at {admin_port}/metrics")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the table of cases into that README")
    parser.add_argument("--list", action="store_true", help="list the cases")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 all applicable cases pass, 1 one does not, 2 nothing could be tried."""
    given = _arguments().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=False)
    if given.side_by_side:
        sys.stdout.write(side_by_side(given.side_by_side))
        return 0
    if given.document:
        document(given.document, cases.all_cases())
        return 0
    chosen = [case for case in cases.all_cases() if case.matches(given.only)]
    chosen = [case for case in chosen if not given.skip or not case.matches(given.skip)]
    if given.list:
        for case in chosen:
            console.print(f"{case.id}: {case.rule}", markup=False)
        return 0
    if not chosen:
        console.print(f"no such case among {len(CASES)}: {', '.join(given.only)} (--list shows them)", markup=False)
        return 2
    return asyncio.run(_run(_adapter(given), chosen, given.json, console))


def _adapter(given: argparse.Namespace) -> Adapter:
    if given.router:
        header = given.session_header.lower()
        return plain(given.router, name=given.name, session_header=header, keyless=given.keyless, metrics=given.metrics)
    return ADAPTERS[given.adapter]() if given.adapter else roost()


async def _run(adapter: Adapter, chosen: list[Case], json_file: Path | None, console: Console) -> int:
    target = Target(adapter)
    started = time.monotonic()
    try:
        await discover(target)
    except (Failed, OSError) as error:
        console.print(f"conformance: {adapter.name}: nothing was tried: {error}", markup=False)
        return 2
    done = 0

    def tell(result: Result) -> None:
        nonlocal done
        done += 1
        line = (
            f"{done:3}/{len(chosen)} {result.verdict.value:4} {result.case.id} ({result.seconds:.1f} s) {result.said}"
        )
        console.print(line[:300], markup=False)

    results = await run(target, chosen, tell)
    seconds = time.monotonic() - started
    console.print(table(results))
    if json_file is not None:
        write_json(json_file, adapter.name, results, seconds)
    console.print(summary(adapter.name, results, seconds), markup=False, soft_wrap=True)
    good = all(result.verdict is not Verdict.FAIL for result in results)
    return 0 if good and any(result.verdict is Verdict.PASS for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
