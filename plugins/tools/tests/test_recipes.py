"""The comment blocks of recipes. tests/integration/test_recipes.py runs the recipes."""

import re
from pathlib import Path

import pytest

from engine_core.errors import ConfigError
from engine_plugin_tools.recipes import FIELDS, RECIPES, parse_header, read_recipe, recipe_names

ROOT = Path(__file__).parents[3]
BLOCK = "# A title\n#\n" + "".join(f"# {field:9}  of {field}\n" for field in FIELDS) + "\n[model]\n"


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_says_how_it_is_installed_on_what_it_runs_and_where_the_published_numbers_are(name):
    about = read_recipe(name).about
    assert about["install"].startswith("pip install ")
    assert re.fullmatch(r"(1 GPU|[248] GPUs) of (24|80) GB", about["hardware"])
    assert re.fullmatch(r"\d+ GiB of each GPU, estimated", about["memory"])
    assert re.fullmatch(r"not measured|\d+", about["minutes"])
    assert re.search(r"\d", about["published"])
    assert all(url.startswith("https://") for url in about["source"].split())
    assert about["status"] == "not run by us on real weights"


@pytest.mark.parametrize("name", recipe_names())
def test_each_setting_of_a_recipe_has_a_reason(name):
    """Keys that speak for themselves are named here."""
    plain = re.compile(
        r"(trainer|name|source|processes|backend = \"torchrun\"|every_steps|at_end|top_p|max_prompts = 500$)"
    )
    settings = read_recipe(name).text.partition("\n\n")[2].splitlines()
    bare = [line for line in settings if "=" in line and "#" not in line]
    assert [line for line in bare if not plain.match(line) and not line.startswith("path = ")] == []


def test_the_folder_in_the_root_is_that_of_the_package_in_every_clone():
    link = ROOT / "recipes"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == RECIPES


def test_a_line_that_begins_with_spaces_continues_the_field_above():
    title, about = parse_header(BLOCK.replace("of what\n", "of what\n#            and more\n"))
    assert title == "A title"
    assert about["what"] == "of what and more"
    assert about["status"] == "of status"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# minutes    of minutes\n", "", "what, install, hardware, memory"),
        ("# memory     of memory\n", "# memory: of memory\n", "'# memory: of memory' is no line"),
        ("# A title\n#\n", "# A title\n# and more\n", "begins with '# TITLE', '#'"),
    ],
)
def test_a_block_of_another_form_is_refused(old, new, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_header(BLOCK.replace(old, new))


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"--recipe 'qwen3-0.6b' is unknown. Did you mean 'qwen3-0.6b-gsm8k'\?"
    ):
        read_recipe("qwen3-0.6b")
