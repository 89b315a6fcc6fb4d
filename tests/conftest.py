"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time: a run that fails, fails for what changed. `HYPOTHESIS_PROFILE=new` draws new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("new")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_TESTS = Path(__file__).parent
_MARKED_FOLDERS = ("harness", "sglang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests below tests/harness and tests/sglang carry that mark, so that `make test` can leave them out."""
    for item in items:
        if not item.path.is_relative_to(_TESTS):
            continue
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _MARKED_FOLDERS:
            item.add_marker(getattr(pytest.mark, folder))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own ROOST_… variables change no test."""
    for name in [name for name in os.environ if name.upper().startswith("ROOST_")]:
        monkeypatch.delenv(name)
