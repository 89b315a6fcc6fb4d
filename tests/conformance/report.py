"""What a run shows: a table, a JSON file that scripts can rely on, and a table of several routers side by side."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.conformance.case import Case, Verdict
from tests.conformance.runner import Result

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NA: "dim"}


def table(results: Sequence[Result]) -> Table:
    """The cases with what came of each."""
    shown = Table(show_lines=False, expand=True, pad_edge=False)
    shown.add_column("case", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("s", justify="right", no_wrap=True)
    shown.add_column("rule, and what was seen")
    for result in results:
        said = f"\n[dim]{_plain(result.said)}[/]" if result.said else ""
        verdict = f"[{_COLOURS[result.verdict]}]{result.verdict}[/]"
        name = result.case.id.replace("[", "\\[")
        shown.add_row(name, verdict, f"{result.seconds:.1f}", _plain(result.case.rule) + said)
    return shown


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def summary(name: str, results: Sequence[Result], seconds: float) -> str:
    """The last line of a run."""
    count = Counter(result.verdict for result in results)
    return (
        f"conformance: {name}: {count[Verdict.PASS]} passed, {count[Verdict.FAIL]} failed, {count[Verdict.NA]} n/a "
        f"of {len(results)} cases in {seconds:.0f} s"
    )


def write_json(path: Path, name: str, results: Sequence[Result], seconds: float) -> None:
    """The same for scripts: `router`, `seconds`, `summary` (verdict → count) and `cases`."""
    count = Counter(result.verdict for result in results)
    told = {
        "router": name,
        "seconds": round(seconds, 1),
        "summary": {verdict.value: count[verdict] for verdict in Verdict},
        "cases": [
            {
                "id": result.case.id,
                "subject": result.case.subject,
                "rule": result.case.rule,
                "sources": list(result.case.sources),
                "verdict": result.verdict.value,
                "said": result.said,
                "seconds": round(result.seconds, 2),
            }
            for result in results
        ],
    }
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def side_by_side(paths: Sequence[Path]) -> str:
    """A Markdown table of several runs' JSON files: a row a rule, a column a router, dialects in one cell."""
    runs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
    names = [run["router"] for run in runs]
    rules: dict[str, str] = {}
    cells: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for each in run["cases"]:
            key = each["id"].partition("[")[0]
            rules.setdefault(key, each["rule"])
            cells.setdefault((key, run["router"]), []).append(each["verdict"])
    lines = ["| case | rule | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for key, rule in rules.items():
        told = " | ".join(_cell(cells.get((key, name), [])) for name in names)
        lines.append(f"| `{key}` | {rule} | {told} |")
    lines.append("| **sum** | passed / failed / n/a | " + " | ".join(_sum(run["summary"]) for run in runs) + " |")
    return "\n".join(lines) + "\n"


def _cell(verdicts: Sequence[str]) -> str:
    if not verdicts:
        return ""
    applicable = [each for each in verdicts if each != Verdict.NA]
    if not applicable:
        return "n/a"
    passed = applicable.count(Verdict.PASS)
    if passed == len(applicable):
        return "pass" if len(applicable) == len(verdicts) else f"pass ({passed} of {len(verdicts)} served)"
    return "**fail**" if passed == 0 else f"**fail** ({passed} of {len(applicable)} pass)"


def _sum(summary: Mapping[str, int]) -> str:
    return " / ".join(str(summary[verdict.value]) for verdict in Verdict)


_CASES = "## The cases"


def document(readme: Path, cases: Sequence[Case]) -> None:
    """Write the table of cases anew, below its heading, which is the last of that file."""
    groups: dict[str, dict[str, list[Case]]] = {}
    for case in cases:
        groups.setdefault(case.subject, {}).setdefault(case.id.partition("[")[0], []).append(case)
    rules = sum(len(named) for named in groups.values())
    lines = [_CASES, "", f"{rules} rules, {len(cases)} cases with their dialects (`--document FILE` writes this part)."]
    for subject, named in groups.items():
        lines += ["", f"### {subject}", "", "| case | rule | source |", "|---|---|---|"]
        for name, same in named.items():
            dialects = f" ({len(same)} dialects)" if len(same) > 1 else ""
            sources = ", ".join(_link(source) for source in same[0].sources)
            lines.append(f"| `{name}`{dialects} | {same[0].rule} | {sources} |")
    before = readme.read_text().partition(_CASES)[0]
    readme.write_text(before + "\n".join(lines) + "\n")


def _link(source: str) -> str:
    if found := re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", source):
        return f"[{found[1]}#{found[2]}]({source})"
    if found := re.fullmatch(r"https://www\.rfc-editor\.org/rfc/rfc(\d+)(?:#section-(.+))?", source):
        return f"[RFC {found[1]}{f' §{found[2]}' if found[2] else ''}]({source})"
    return f"[{source.split('/')[2]}]({source})" if source.startswith("https://") else source
