"""SECURITY.md says what is so: its settings can be used, and the tests it names are there."""

from __future__ import annotations

import re
from pathlib import Path

from router.api.keys import read_keys
from router.settings import cautions, load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
SETTINGS, KEYS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_hardened_settings_are_settings(tmp_path: Path) -> None:
    """Without a caution but that their files are not here, with tokens on the admin API and every default that the page
    relies on.
    """
    file = tmp_path / "roost.yaml"
    file.write_text(SETTINGS, encoding="utf-8")
    settings = load(file, {})
    assert [caution.wrong for caution in cautions(settings) if "there is no file" not in caution.wrong] == []
    assert (settings.auth.client_credentials, settings.auth.engine_paths) == ("drop", "refuse")
    assert not settings.admin.unprotected


def test_the_keys_file_is_one() -> None:
    assert {(tenant.name, tenant.engine_control) for tenant in read_keys(KEYS).tenants} == {
        ("acme", False),
        ("operators", True),
    }


def test_every_test_it_names_is_there() -> None:
    """`::name` alone belongs to the file named before it."""
    file = ""
    named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", PAGE)
    assert len([each for each in named if any(each)]) > 30
    for path, name in named:
        file = path or file
        if path or name:
            assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
