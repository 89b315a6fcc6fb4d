"""Running the shared harness recipes, unchanged, and reading what came of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.harness.stage import ADMIN_PORT, BACK_PORTS, FRONT_PORT, ROUTER_PORT, Result, Spec, result_of, write_spec
from tests.harness.wire import Exchange

__all__ = ["HARNESSES", "Harness", "MockTurn", "Rig", "Run", "turns_of"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_RESUME = "echo --- resume"
# In one's own namespaces: nothing reaches the network, ports never clash, and whatever a CLI leaves behind (tmux,
# daemons) ends with the run.
_ALONE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A coding-agent CLI, and how its recipe's output shows that the work is done."""

    name: str
    cli: str
    """Folder of the CLI below npm/ of the tools, and its command there."""
    command: str
    done: tuple[str, ...]
    """What the recipe prints in this order when all went well."""
    finished_turns: int
    """Main turns that the script answers with its last word."""
    knobs: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


HARNESSES: dict[str, Harness] = {
    each.name: each
    for each in (
        Harness(
            name="codex",
            cli="codex",
            command="codex",
            done=("DONE. All finished.", "turn.completed", "--- resume", "DONE. Resumed.", "turn.completed"),
            finished_turns=2,
        ),
        Harness(
            name="claude",
            cli="claude",
            command="claude",
            done=('"result":"DONE. All finished."',),
            finished_turns=1,
        ),
        Harness(
            name="claude_tui",
            cli="claude",
            command="claude",
            done=("DONE. Resumed.", "Compacted"),
            finished_turns=2,
            # With the side traffic that the other Claude recipe switches off: a title request beside each prompt.
            env={"FULLTRAFFIC": "1"},
        ),
        Harness(
            name="opencode",
            cli="opencode",
            command="opencode",
            done=("DONE. All finished.", "--- resume", "DONE. Resumed."),
            finished_turns=2,
        ),
        Harness(
            name="kimicode",
            cli="kimicode",
            command="kimi",
            done=("DONE. All finished.", "--- resume", "DONE. All finished."),
            finished_turns=2,
            # Kimi Code refuses the script's usual kind of subagent.
            knobs={"MOCK_SUBTYPE": "coder"},
        ),
        Harness(
            name="qwen",
            cli="qwen",
            command="qwen",
            done=("--- resume", "DONE. Resumed."),
            finished_turns=2,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MockTurn:
    """A model request as a mock logged it, and its exchange as the tap before that mock saw it."""

    mock: str
    seq: int
    role: str
    last_word: bool
    """Whether the script answered with plain text that ends the task."""
    headers: dict[str, str]
    body: dict[str, Any]
    exchange: Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one harness and everything recorded of it."""

    harness: Harness
    result: Result = field(repr=False)
    turns: tuple[MockTurn, ...] = field(repr=False)
    """In the order in which the mocks saw them; empty for a run without a router."""
    printed: str = field(repr=False)
    """The recipe's own output."""
    router_log: str = field(repr=False)

    @property
    def front(self) -> list[Exchange]:
        """What the harness sent and got, in order."""
        return sorted((e for e in self.result.exchanges if e.tap == "front"), key=lambda e: e.started_s)

    @property
    def back(self) -> list[Exchange]:
        """What the mocks got and sent, in order."""
        return sorted((e for e in self.result.exchanges if e.tap != "front"), key=lambda e: e.started_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """Where things are, and how to run a recipe."""

    shared: Path
    tools: Path
    router: tuple[str, ...]
    """Command line of another router, with {port} and {replicas} in it; empty: Roost."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Rig:
        """From `ROOST_SHARED` (default: shared/ beside the repository), `TOOLS` and `ROOST_HARNESS_ROUTER`."""
        return cls(
            shared=Path(env.get("ROOST_SHARED") or _REPOSITORY.parent / "shared"),
            tools=Path(env.get("TOOLS") or Path.home() / ".cache" / "roost-harness"),
            router=tuple(env.get("ROOST_HARNESS_ROUTER", "").split()),
        )

    def missing(self) -> str:
        """Why no harness at all can be run here; empty if one can."""
        if not (self.shared / "harness" / "mock.py").is_file():
            return "the shared harness recipes are not there (shared/ beside the repository, or ROOST_SHARED)"
        if os.geteuid() != 0:
            return "needs root: each run has a network of its own (unshare)"
        for tool in ("unshare", "ip", "git", "bash"):
            if shutil.which(tool) is None:
                return f"needs {tool}"
        if subprocess.run(
            [*_ALONE, "--", "ip", "link", "set", "lo", "up"], capture_output=True, check=False
        ).returncode:
            return "the system does not allow namespaces (unshare)"
        node = self.tools / "npm" / "node22" / "node_modules" / ".bin" / "node"
        if not node.exists():
            return "node 22 is not installed (shared harness/install.sh)"
        return ""

    def missing_for(self, harness: Harness) -> str:
        """Why this harness cannot be run here; empty if it can."""
        if reason := self.missing():
            return reason
        if not (self.tools / "npm" / harness.cli / "node_modules" / ".bin" / harness.command).exists():
            return f"{harness.name} is not installed (shared harness/install.sh)"
        if harness.name == "claude_tui" and shutil.which("tmux") is None:
            return "needs tmux"
        return ""

    def run(
        self,
        harness: Harness,
        out: Path,
        *,
        through: bool = True,
        knobs: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        until_resume: bool = False,
        timeout_s: float = 150.0,
    ) -> Run:
        """Run a recipe in the new folder `out`: `settings` go over the router's, `until_resume` cuts the recipe."""
        spec = self._spec(
            harness, out, through, {**harness.knobs, **(knobs or {})}, settings or {}, until_resume, timeout_s
        )
        file = out / "spec.json"
        write_spec(spec, file)
        stage = [*_ALONE, "--", sys.executable, "-m", "tests.harness.stage", str(file)]
        done = subprocess.run(
            stage, cwd=_REPOSITORY, capture_output=True, text=True, timeout=timeout_s + _GRACE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the stage of {harness.name} failed; see {out}\n{done.stderr[-2000:]}")
        result = result_of(out)
        return Run(
            harness=harness,
            result=result,
            turns=tuple(turns_of(out, result.exchanges)) if through else (),
            printed=(out / "run.log").read_text(errors="replace"),
            router_log=(out / "router.log").read_text(errors="replace") if through else "",
        )

    def _spec(
        self,
        harness: Harness,
        out: Path,
        through: bool,
        knobs: Mapping[str, str],
        settings: Mapping[str, Any],
        until_resume: bool,
        timeout_s: float,
    ) -> Spec:
        scripts = self.shared / "harness"
        home, work, tmux = out / "home", out / "work", out / "tmux"
        for folder in (home, work, tmux):
            folder.mkdir(parents=True)
        _repository(work)
        recipe = scripts / "recipes" / f"{harness.name}.sh"
        if until_resume:
            recipe = _cut(recipe, out / "recipe.sh")
        npm = self.tools / "npm"
        env = {
            "HOME": str(home),
            "PATH": f"{npm}/node22/node_modules/.bin:/usr/bin:/bin:/usr/sbin",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "H": str(scripts),
            "N": str(npm),
            "P": str(self.tools / "py"),
            "BASE": f"http://127.0.0.1:{FRONT_PORT}",
            "CI": "",
            "TMUX_TMPDIR": str(tmux),
            **harness.env,
        }
        return Spec(
            out=out,
            mock=scripts / "mock.py",
            # Longer replies than the script's default, so that subagents started one after the other do overlap.
            knobs={"MOCK_DELAY": "0.6", **knobs},
            recipe=recipe,
            recipe_env=env,
            router=self._router(out, settings) if through else (),
            timeout_s=timeout_s,
        )

    def _router(self, out: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
        replicas = [f"http://127.0.0.1:{port}" for port in BACK_PORTS]
        if self.router:
            return tuple(part.format(port=ROUTER_PORT, replicas=",".join(replicas)) for part in self.router)
        config = out / "roost.yaml"
        fleet = {"name": "mock", "models": ["mock-model", "mock-small"], "replicas": replicas}
        config.write_text(yaml.safe_dump({"fleets": [fleet], **settings}))
        roost = str(Path(sys.executable).with_name("roost"))
        ports = ("--port", str(ROUTER_PORT), "--admin-port", str(ADMIN_PORT))
        return (roost, "router", *ports, "--config", str(config))


def turns_of(out: Path, exchanges: Sequence[Exchange]) -> list[MockTurn]:
    """The mocks' logs joined with the taps' records by connection and place on it."""
    seen = {(e.tap, e.port, e.ordinal): e for e in exchanges}
    turns = []
    for file in sorted(out.glob("mock?.jsonl")):
        places: Counter[int] = Counter()
        for line in file.read_text().splitlines():
            logged = json.loads(line)
            if "method" not in logged:
                continue  # an event of an earlier request
            place = places[logged["peer"]]
            places[logged["peer"]] += 1
            if "role" not in logged:
                continue  # not a model request
            kind, said = logged["act"]
            turns.append(
                MockTurn(
                    mock=file.stem,
                    seq=logged["seq"],
                    role=logged["role"],
                    last_word=kind == "text" and str(said).startswith("DONE") and "fail" not in logged,
                    headers={name.lower(): value for name, value in logged["headers"]},
                    body=logged["body"],
                    exchange=seen[file.stem, logged["peer"], place],
                )
            )
    return sorted(turns, key=lambda turn: turn.seq)


def _repository(work: Path) -> None:
    """The small repository that the recipes are run in."""
    (work / "hello.txt").write_text("hi\n")
    who = ("-c", "user.email=a@b", "-c", "user.name=n")
    for words in (("init", "-q", "."), (*who, "add", "-A"), (*who, "commit", "-qm", "init")):
        subprocess.run(["git", *words], cwd=work, check=True, capture_output=True)


def _cut(recipe: Path, to: Path) -> Path:
    """The recipe up to the part that resumes in a new process."""
    to.write_text(recipe.read_text().split(_RESUME)[0])
    return to
