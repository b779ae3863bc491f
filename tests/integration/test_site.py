"""Pages made from the code, and tables that follow the code and package metadata."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import tomllib
import typing
from pathlib import Path

import pytest
import torch

from engine_core.algorithms.regularizers import kl_estimate
from engine_core.builtin import PPOClipOptions
from engine_core.config.models import AlgorithmConfig
from engine_core.errors import ConfigError
from engine_core.plugins.metadata import installed, known_names
from engine_core.types import Prompt
from engine_plugin_tools.commands.schema import installed_specs
from engine_plugin_tools.schema import json_schema, schema_at
from engine_plugin_trainers.options import KTOOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLUGINS = sorted(file.parent for file in (ROOT / "plugins").glob("[a-z]*/pyproject.toml"))


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
    text = "".join(page.read_text("utf-8") for page in (DOCS / "reference" / "config").glob("*.md"))
    assert "| `group_size` | `integer > 0` | `8` | G: responses sampled for each prompt. |" in text
    assert "## `[reward.length]`" in text
    assert "| `max_tokens` | `integer > 0` | required |" in text
    for heading in (
        "## `[sft]`",
        "## `[async]`",
        "## `[actor.fsdp]`",
    ):  # tables of trainers too, and a backend's once
        assert text.count(heading + "\n") == 1
    assert "## `[critic.fsdp]`" not in text


def test_the_glossary_defines_each_term_once():
    rows = re.findall(
        r"^\| ([^|]+) \| (.+) \|$", (DOCS / "reference" / "glossary.md").read_text("utf-8"), re.MULTILINE
    )
    terms = [term for term, _ in rows if term != "term"]
    assert sorted(terms) == sorted(set(terms))
    assert {"step", "update", "row", "column", "group", "rollout", "response", "episode"} <= set(terms)
    assert {"policy version", "staleness", "role", "rank", "worker", "sampler", "trainer"} <= set(terms)
    assert {"plugin", "hook", "part", "capability"} <= set(terms)
    assert [term for term, meaning in rows if len(re.findall(r"\.(?= [A-Z]|$)", meaning)) > 3] == []


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


def remark_on(page: str, theirs: str, key: str) -> str:
    """Return the remark of the row of a page about another trainer that holds its name beside our key."""
    rows = ((DOCS / page).read_text("utf-8")).splitlines()
    (row,) = (row for row in rows if row.startswith(f"| `{theirs}`") and f"| `{key}` |" in row)
    return row.split(" | ")[2]


MISSING = {
    "SGLang samplers": lambda: not any("sglang" in name for name in known_names("rollout_engines")),
    "images": lambda: (
        {field.name for field in dataclasses.fields(Prompt)} == {"id", "token_ids", "text", "columns"}
    ),
}
"""What pages say is not here, and whether that holds."""


@pytest.mark.parametrize("page", ["from_verl.md", "from_trl.md"])
def test_what_a_page_says_is_not_here_is_not_here(page):
    said = (DOCS / page).read_text("utf-8").partition("## What is not here\n")[2]
    listed = re.findall(r"^\* (.+)\.$", said, re.MULTILINE)
    assert listed
    for thing in listed:
        assert MISSING[thing](), f"{page}: {thing} exist"
    for engine in ("megatron", "deepspeed"):
        assert "experimental" in (DOCS / f"{engine}.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("theirs", "kind", "key"),
    [
        ("actor_rollout_ref.rollout.name", "rollout_engines", "rollout.backend"),
        ("actor_rollout_ref.actor.strategy", "train_engines", "actor.backend"),
    ],
)
def test_the_engines_beside_those_of_verl_are_all_that_are_installed(theirs, kind, key):
    specs = installed_specs()[kind]
    policies = {name for name, spec in specs.items() if not getattr(spec, "frozen_only", False)}
    assert set(re.findall(r"`(\w+)`", remark_on("from_verl.md", theirs, key))) == policies


def test_names_in_remarks_on_trl_are_names_here():
    losses = re.findall(r"`(\w+)`", remark_on("from_trl.md", "importance_sampling_level", "algorithm.loss"))
    assert set(losses) - {"sequence"} <= set(known_names("losses"))
    values = set(re.findall(r"`(\w+)`", remark_on("from_trl.md", "loss_type", "kto.loss")))
    assert values == set(typing.get_args(KTOOptions.model_fields["loss"].annotation))
    rows = [row for row in (DOCS / "from_trl.md").read_text("utf-8").splitlines() if "| `loss_type` `" in row]
    ways = {way for row in rows for way in re.findall(r"`([a-z]+-[a-z-]+)`", row)}
    assert len(ways) == 3
    assert ways < set(typing.get_args(AlgorithmConfig.model_fields["loss_aggregation"].annotation))


def test_delta_and_the_kl_of_trl_are_what_the_rows_say():
    delta = PPOClipOptions.model_fields["delta"].description
    assert "upper bound of the ratio in the unclipped term" in delta
    assert "upper bound of the ratio in the unclipped term" in remark_on(
        "from_trl.md", "delta", "algorithm.ppo_clip.delta"
    )
    log_probs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    gap = ref - log_probs
    torch.testing.assert_close(kl_estimate(log_probs, ref, "k3"), gap.exp() - 1 - gap)  # no importance ratio
    assert "use_bias_correction_kl=False" in remark_on("from_trl.md", "beta", "algorithm.kl_coef")


def test_no_page_puts_off_what_may_have_come_since():
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("plugins/*/README.md")]:
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            assert not re.search(r"Not yet:|[|—:] *not yet|` today\b", line), f"{page.name}:{number}: {line}"


def is_key(schema, key):
    try:
        return bool(schema_at(schema, key))
    except ConfigError:
        return False


def test_a_misspelt_key_is_no_key():
    schema = json_schema(installed_specs())
    assert is_key(schema, "rollout.group_size")
    assert not is_key(schema, "rollout.group_sizes")


def fenced(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def tree_rows(text: str, top: str) -> dict[str, str]:
    """Return the entries below a folder in the tree of the page on architecture, each with its description."""
    (below,) = re.findall(rf"^{top}/.*\n((?:  .*\n)*)", text, re.MULTILINE)
    rows = (line.strip().partition("  ") for line in below.splitlines())
    return {name: said.strip() for names, _, said in rows for name in names.split()}


def test_the_tree_on_the_page_is_the_tree():
    text = (DOCS / "architecture.md").read_text("utf-8")
    tree = next(block for _, block in fenced(text) if block.startswith("engine_core/"))
    kernel = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "engine_core").iterdir()
        if path.name not in {"__init__.py", "__pycache__", "py.typed"}
        and (path.is_file() or any(path.rglob("*.*")))
    }
    assert {*tree_rows(tree, "engine_core")} == kernel
    assert {*tree_rows(tree, "plugins")} == {f"{folder.name}/" for folder in PLUGINS}
    for folder in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_the_layers_on_the_page_are_those_of_the_linter():
    contracts = project_file(ROOT)["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    shown = [block for _, block in fenced((DOCS / "architecture.md").read_text("utf-8"))]
    lines = [layer.replace("engine_core.", "").replace(" | ", ", ") for layer in layers]
    assert "\n".join(lines) + "\n" in shown


def project_file(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))


def project_of(folder: Path) -> dict:
    return project_file(folder)["project"]


def ours_in(requirements: list[str]) -> set[str]:
    """Return the plugins of ours among requirements, by folder."""
    names = {re.match(r"[\w-]+", line)[0] for line in requirements}
    return {
        name.removeprefix("engine-plugin-").replace("-", "_") for name in names if "engine-plugin-" in name
    }


def test_the_table_of_distributions_is_that_of_their_metadata():
    """Architecture says which distribution depends on which, and what the extra ``standard`` brings."""
    rows = re.findall(
        r"^\| `plugins/(\w+)` \| ([^|]*) \|", part("architecture.md", "distributions"), re.MULTILINE
    )
    said = {folder: {*re.findall(r"`(\w+)`", needs)} for folder, needs in rows}
    assert said == {folder.name: ours_in(project_of(folder)["dependencies"]) for folder in PLUGINS}
    standard = ours_in(project_of(ROOT)["optional-dependencies"]["standard"])
    (sentence,) = re.findall(
        r"`standard` brings (.*?)\.", (DOCS / "architecture.md").read_text("utf-8"), re.DOTALL
    )
    assert {*re.findall(r"`(\w+)`", sentence)} == standard


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_the_readme_of_a_plugin_says_how_to_use_it(folder):
    project, text = project_of(folder), (folder / "README.md").read_text("utf-8")
    assert text.startswith(f"# {project['name']}\n\n")
    shell = "".join(block for language, block in fenced(text) if language == "bash")
    commands = [shlex.split(line, comments=True) for line in shell.splitlines() if line]
    installed_by = [words[2].partition("[")[0] for words in commands if words[:2] == ["pip", "install"]]
    assert installed_by == [project["name"]]
    run = [words for words in commands if words[0] != "pip"]  # test_docs.py runs these and the blocks
    assert run or {"python", "toml", "console"} & {language for language, _ in fenced(text)}, "no example"
    needs = next(part for part in text.split("\n\n") if part.startswith("Depends on "))
    for other in ours_in(project["dependencies"]):
        assert f"`engine-plugin-{other.replace('_', '-')}`" in needs, other
    offered = {offer.name for offer in installed() if offer.distribution.name == project["name"]}
    forms = ("`{}`", "`engine {}`", '"{}"')
    missing = [
        name for name in offered if not any(form.format(name.replace(".", " ")) in text for form in forms)
    ]
    assert sorted(missing) == []


def part(page: str, name: str) -> str:
    """The text of a page between two markers."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]
