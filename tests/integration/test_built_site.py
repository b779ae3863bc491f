"""The site that `make docs` builds. `make lint` runs these tests: the build takes as long as many other tests together."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import zipfile
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-W", "--keep-going", "-d", str(folder / "cache")]
    command += [
        "-D",
        "toc_object_entries=0",
    ]  # without the list of objects at the side of a page, in half of the time
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


def example_files(folder: Path) -> dict[str, bytes]:
    """Return the files of an example by path, without those that runs, tests and builds leave there."""
    left = re.compile(r"/(\.[^/]*|__pycache__|[^/]*\.egg-info|build|dist|runs)(/|$)")
    files = {f"/{file.relative_to(ROOT).as_posix()}": file for file in folder.rglob("*") if file.is_file()}
    return {name[1:]: file.read_bytes() for name, file in files.items() if not left.search(name)}


def test_a_link_to_an_example_is_a_zip_of_all_its_files_in_the_site(site):
    linked = {
        (page.relative_to(DOCS).with_suffix(".html"), name)
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"\]\((?:\.\./)+examples/(\w+)/?\)", page.read_text("utf-8"))
    }
    assert linked
    for page, name in linked:
        link = f"{'../' * (len(page.parts) - 1)}_static/examples/{name}.zip"
        assert f'href="{link}"' in (site / page).read_text("utf-8"), page
        with zipfile.ZipFile((site / page).parent / link) as packed:
            assert {each: packed.read(each) for each in packed.namelist()} == example_files(
                ROOT / "examples" / name
            )
            assert {entry.date_time[0] for entry in packed.infolist()} == {1980}  # the same bytes each time


def test_no_signature_or_value_of_the_api_pages_shows_the_text_of_an_object(site):
    for page in (site / "reference" / "api").glob("*.html"):
        for signature in re.findall(r"<dt class=\"sig .*?</dt>", page.read_text("utf-8"), re.DOTALL):
            text = unescape(re.sub(r"<[^>]+>", "", signature))
            assert not re.search(r" at 0x|<(class|function|built-in) ", text), f"{page.name}: {text}"


def test_no_type_of_python_is_linked_to_an_attribute_of_its_name(site):
    """`bytes` was linked to `SyncResult.bytes`."""
    checked = 0
    for page in (site / "reference" / "api").glob("*.html"):
        for signature in re.findall(r"<dt class=\"sig .*?</dt>", page.read_text("utf-8"), re.DOTALL):
            for link in re.findall(r'<a class="reference internal".*?</a>', signature, re.DOTALL):
                text = re.sub(r"<[^>]+>", "", link)
                assert not hasattr(builtins, text), f"{page.name}: {link}"
                checked += 1
    assert checked > 100


def test_the_api_pages_show_the_attributes_that_plugins_use(site):
    ids = {
        each
        for page in (site / "reference" / "api").glob("*.html")
        for each in re.findall(r'id="(engine_[\w.]+)"', page.read_text("utf-8"))
    }
    attributes = {
        "engine_core.runs.tracking.RunFolder": ("path", "start_step", "checkpoints", "metrics_file"),
        "engine_core.runs.tracking.Tracker": ("options",),
        "engine_core.train.run.TrainingRun": (
            "config",
            "plugins",
            "folder",
            "groups",
            "runtime",
            "step_done",
        ),
        "engine_core.train.sampled_run.SampledRun": ("rewards", "sampler", "version"),
        "engine_core.contracts.engines.TrainEngine": ("module", "optimizer", "config", "model_config"),
        "engine_core.contracts.engines.RolloutEngine": ("version", "running", "context"),
        "engine_plugin_agents.Episode": ("prompt", "token_ids", "messages", "counts"),
    }
    assert {f"{kind}.{name}" for kind, names in attributes.items() for name in names} <= ids


def test_the_pages_made_from_the_code_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(DOCS / "references.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
