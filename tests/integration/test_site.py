"""The site that `make docs` builds, and the pages in it that are made from the code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from engine_core.cli.configs import installed_specs
from engine_core.config.schema import json_schema, schema_at
from engine_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-W", "--keep-going", "-d", str(folder / "cache")]
    done = subprocess.run(
        [*command, str(DOCS), str(folder / "html")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_is_in_the_site_and_can_be_reached_from_its_start(site):
    menu = (site / "index.html").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        if "_build" not in name.parts and name.name != "index.html":
            assert (site / name).is_file()
            assert f'href="{name.as_posix()}"' in menu, name


def test_links_and_anchors_within_the_site_lead_somewhere(site):
    pages = {page: page.read_text("utf-8") for page in site.rglob("*.html")}
    checked = 0
    for page, text in pages.items():
        article = text.split("<article", 1)[-1].split("</article>", 1)[0]
        for link in re.findall(r'href="([^"]+)"', article):
            path, _, anchor = unescape(link).partition("#")
            if "://" in path or path.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or f'id="{anchor}"' in pages.get(target, ""), f"{page.name}: {link}"
            checked += 1
    assert checked > 100


def test_the_pages_made_from_the_code_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(DOCS / "references.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_is_out_of_date_is_named_and_left_alone(tmp_path, monkeypatch, capsys):
    made = runpy.run_path(str(DOCS / "references.py"))
    scope = made["main"].__globals__
    monkeypatch.setitem(scope, "PAGES", {"errors.md": made["errors_page"]})
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "errors.md").write_text("old")
    monkeypatch.setitem(scope, "DOCS", tmp_path)
    assert made["main"](check=True) == 1
    assert "Out of date: errors.md. Run: python docs/references.py" in capsys.readouterr().out
    assert (tmp_path / "reference" / "errors.md").read_text() == "old"
    assert made["main"]() == 1
    assert made["main"](check=True) == 0


def test_the_reference_has_every_key_with_its_default():
    text = (DOCS / "reference" / "config.md").read_text("utf-8")
    assert "| `group_size` | `integer > 0` | `8` | G: responses sampled for each prompt. |" in text
    assert "## `[reward.length]`" in text
    assert "| `max_tokens` | `integer > 0` | required |" in text


def our_column(page: str) -> list[tuple[int, str]]:
    """(line, key) of the second column of the tables of a page about another trainer."""
    found = []
    for number, line in enumerate((DOCS / page).read_text("utf-8").splitlines(), 1):
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) >= 5 and "`" in cells[1]:
            found += [(number, key) for key in re.findall(r"`\[*([a-z]\w*(?:\.\w+)*)", cells[2])]
    return found


@pytest.mark.parametrize(("page", "least"), [("from_verl.md", 40), ("from_trl.md", 40)])
def test_our_keys_beside_those_of_other_trainers_are_keys(page, least):
    schema = json_schema(installed_specs())
    keys = our_column(page)
    assert len(keys) >= least
    for line, key in keys:
        assert is_key(schema, key), f"{page}:{line}: {key}"


def is_key(schema, key):
    try:
        return bool(schema_at(schema, key))
    except ConfigError:
        return False


def test_a_misspelt_key_is_no_key():
    schema = json_schema(installed_specs())
    assert is_key(schema, "rollout.group_size")
    assert not is_key(schema, "rollout.group_sizes")
