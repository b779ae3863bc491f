"""README.md, docs/ and the README of every plugin against the project: every command is run, every block is used, every name exists.

A page is a session in a folder of its own, read from top to bottom:

* a ``bash`` block: each line is run and must succeed;
* a ``console`` block: each line after ``$`` is run, and must print the lines below it (``...`` stands
  for anything); with ``engine: ...`` below it, it must be refused with that message;
* a ``python`` or ``toml`` block that names a file (``` ```python first/short.py ```) is written there;
* any other ``python`` block is run, any other ``toml`` block must be a valid part of a run file;
* ``json`` must parse, and ``text`` is a picture;
* ``py`` and ``sh`` are other programs' code, which must parse and is not run; ``{toctree}`` and ``{eval-rst}`` are for the site;
* ``pip install -e FOLDER`` of a folder of the page makes its entry points and modules known until the page ends.

The folder holds copies of ``examples/``, the ``demo/`` that a short demo leaves, a small ``run.toml``,
its data and its finished run, so that commands mean here what they mean to a reader.
"""

from __future__ import annotations

import ast
import json
import re
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import hub_folders
import pytest

from engine_core import Trainer, load_config
from engine_core.cli.main import main
from engine_core.config.models import EngineConfig
from engine_core.plugins.metadata import TABLES, known_names
from engine_core.specs import TABLE_SPECS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLUGINS = sorted(file.parent for file in (ROOT / "plugins").glob("[a-z]*/pyproject.toml"))
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.relative_to(DOCS).parts),
    *(folder / "README.md" for folder in PLUGINS),
]
NAMES = [str(page.relative_to(ROOT)).removeprefix("docs/") for page in PAGES]

NOT_RUN_HERE = {
    r"make (demo|demo-control)|engine demo.*": "minutes; tests/integration/test_examples.py runs it in small, and `slow` in full",
    r"make (install|test|test-full|lint|docs)": "this test is a part of it",
    r"pip install engine-.*": "asks the package index; tests/integration/test_wheels.py installs the wheels",
    r"pip (install (-e|--force-reinstall)|wheel) .*": "changes the environment of this test; the tests of the template and of the examples install them",
    r"ray start .*|engine train .* runtime.backend=ray.*": "a cluster takes a while; plugins/ray/tests/test_losses.py runs it",
    r"torchrun .*": "two nodes; tests/integration/test_two_nodes.py runs it on loopback",
    r"python examples/calculator/run.py": "minutes; tests/integration/test_calculator.py runs it in small, and `slow` in full",
    r"engine data gsm8k gsm8k-rows .*": "needs a copy of the hub's repository; tests/integration/test_public_datasets.py has one",
    r"(printf .* \| )?engine (serve|chat) .*": "serves or talks until it is ended; tests/integration/test_serve.py runs both",
    r"engine watch .*": "serves until it is ended; plugins/tools/tests/test_watch.py asks and ends it",
    r"engine serve-reward .*": "serves until it is ended; tests/integration/test_serve_reward.py starts, asks and ends it",
    r"pytest first/.*": "needs the package installed; plugins/tools/tests/test_scaffold.py runs the template's tests",
    r"engine (eval (Qwen/|runs/first).*|train first-hub/.*|compare after before|(export|push) runs/first .*)|hf download .*": "asks the hub; tests of recipes, suites, cards and pushes run each on stand-ins",
    r"pytest examples/(custom_model|backends)": "tests/integration/test_examples.py runs them",
}
"""Commands that cannot be nested in a test, and why. Any other command is run."""

EXIT_CODES = {"doctor": {0, 5}}  # 5: the machine of the test may have a problem
SMALL = {
    "ENGINE__RUN__STEPS": "2",
    "ENGINE__ROLLOUT__GROUP_SIZE": "4",
    "ENGINE__ROLLOUT__MAX_RESPONSE_TOKENS": "8",
}
WHOLE_RUNS = (
    "README",
    "plugins",
    "algorithms",
    "custom_model",
    "custom_model_vllm",
    "train_engine",
    "rollout_engine",
    "weight_transport",
    "from_verl",
    "from_trl",
)
ENVIRONMENT = {f"{page}.md": SMALL for page in WHOLE_RUNS}
OTHERS = ("from_verl.md", "from_trl.md")  # their first columns hold other projects' keys

RUN = """
[model]
path = "model"
[rollout]
group_size = 3
max_response_tokens = 6
[[reward]]
name = "numeric"
[data]
train = "data/train.jsonl"
validation = "data/heldout.jsonl"
prompts_per_step = 4
[run]
steps = 2
"""


CPU_SECONDS = 60  # of a program that is none of ours
PAGE_SECONDS = 300  # as any test
NEEDS_EXAMPLE = ("custom_model.md", "custom_model_vllm.md")  # pages that install examples/custom_model


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    file: str
    text: str


def blocks_of(text: str) -> list[Block]:
    found = re.finditer(r"^```([\w{}-]*)(?: +(\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text[: m.start()].count("\n") + 1, m[1], m[2] or "", m[3]) for m in found]


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """(command, lines that it must print) of a bash or console block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        return [(line, []) for line in lines if line.strip() and not line.startswith("#")]
    found: list[tuple[str, list[str]]] = []
    for line in filter(None, lines):
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def reason_not_run(command: str) -> str | None:
    words = " ".join(shlex.split(command, comments=True))
    return next((why for pattern, why in NOT_RUN_HERE.items() if re.fullmatch(pattern, words)), None)


@pytest.fixture(scope="session")
def library(world, demo, tmp_path_factory):
    """Make what every page's folder begins with."""
    folder = tmp_path_factory.mktemp("pages")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(demo[0], folder, ignore=ignored, dirs_exist_ok=True, symlinks=True)
    shutil.copytree(world / "model", folder / "model")
    for model in ("sft", "trained"):  # smaller ones, with the tokenizer of the data below
        shutil.rmtree(folder / "demo" / model)
        shutil.copytree(world / "model", folder / "demo" / model)
    shutil.copytree(world / "data", folder / "demo" / "data", dirs_exist_ok=True)
    (folder / "data").mkdir()
    for name, rows in (("train", 16), ("heldout", 4)):
        lines = (world / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines[:rows]))
    (folder / "more.jsonl").write_text("".join(lines[:2]))
    hub_folders.write("gsm8k", folder / "mirrors" / "gsm8k")
    (folder / "run.toml").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "run.toml", "--set", "run.name=math", "--steps", "12"]) == 0
        _make_chat_model(folder)
    return folder


def _make_chat_model(folder: Path) -> None:
    """Make ``tiny/chat`` of the folder's model, by the block of ``first_run.md`` that makes it."""
    shutil.copytree(folder / "model", folder / "tiny" / "model")
    config = folder / "tiny" / "model" / "config.json"  # with as many positions as the model of that page
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32768}))
    block = next(b for b in blocks_of((DOCS / "first_run.md").read_text()) if '("tiny/chat")' in b.text)
    script = folder / "tiny" / "make_chat.py"
    script.write_text(block.text)
    runpy.run_path(str(script))
    shutil.rmtree(folder / "tiny" / "model")  # a page that makes one begins without
    run = RUN.replace('"model"', '"../model"').replace('"data/', '"../data/')
    (folder / "tiny" / "run.toml").write_text(run)


class Session:
    """Runs the blocks of one page in its folder and collects what went wrong."""

    def __init__(self, page: str, folder: Path, capsys, monkeypatch) -> None:
        self.page, self.folder, self.capsys, self.monkeypatch = page, folder, capsys, monkeypatch
        self.problems: list[str] = []

    def run(self, block: Block) -> None:
        """Do with a block what its language asks for."""
        try:
            getattr(self, f"_{block.language.strip('{}').replace('-', '_') or 'text'}")(block)
        except Exception as error:
            shown = self.capsys.readouterr()
            told = "".join(shown)[-2000:]
            self.problems.append(f"{self.page}:{block.line}: {type(error).__name__}: {error}\n{told}")

    def _bash(self, block: Block) -> None:
        for command, expected in commands_of(block):
            if reason_not_run(command) is None:
                self._command(command, expected)
            elif command.startswith("make "):
                target = shlex.split(command, comments=True)[1]
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            elif command.startswith("pip install -e "):
                self._install(shlex.split(command)[-1].partition("[")[0])

    _console = _bash

    def _install(self, folder: str) -> None:
        """Make the distribution in a folder of the page known, as an editable installation would."""
        project = tomllib.loads((self.folder / folder / "pyproject.toml").read_text("utf-8"))["project"]
        site = self.folder / ".site"
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        requires = "".join(f"Requires-Dist: {line}\n" for line in project.get("dependencies", ()))
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(head + requires)
        groups = [
            f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in names.items())
            for group, names in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        self.monkeypatch.syspath_prepend(str(site))
        self.monkeypatch.syspath_prepend(str(self.folder / folder / "src"))

    def _command(self, command: str, expected: list[str]) -> None:
        program, *arguments = shlex.split(command, comments=True)
        arguments, target = (arguments[:-2], arguments[-1]) if ">" in arguments[-2:] else (arguments, None)
        self.capsys.readouterr()
        if program == "engine":
            code = main(arguments)
            out, err = self.capsys.readouterr()
        else:
            program = sys.executable if program == "python" else program
            code, out, err = run_alone([program, *arguments])
        if target:
            self._write(target, out)
        refused = any(line.startswith("engine: ") for line in expected)
        wanted = {2, 3, 4} if refused else EXIT_CODES.get((arguments or [""])[0], {0})
        assert code in wanted, (
            f"$ {command}\nends with {code}, expected {wanted}:\n{out[-1500:]}\n{err[-1500:]}"
        )
        missing = not_printed(expected, out + "\n" + err)
        assert not missing, f"$ {command}\ndoes not print: {missing}\nbut:\n{out[-1500:]}\n{err[-1500:]}"

    def _python(self, block: Block) -> None:
        name = block.file or f"block_{block.line}.py"
        path = self._write(name, block.text)
        if not block.file:
            runpy.run_path(str(path), run_name="__main__")

    def _toml(self, block: Block) -> None:
        parsed = tomllib.loads(block.text)
        if block.file.endswith("pyproject.toml"):
            self._write(block.file, block.text)
        elif "project" in parsed:
            groups = parsed["project"].get("entry-points", {})
            known = {*TABLE_SPECS, *known_names(TABLES), "plugins", TABLES}
            assert {group.removeprefix("engine.") for group in groups} <= known
        elif block.file:
            self._write(block.file, block.text)
        else:
            load_config("run.toml", self._write(f"part_{block.line}.toml", block.text))

    def _json(self, block: Block) -> None:
        json.loads(block.text)
        if block.file:
            self._write(block.file, block.text)

    def _text(self, block: Block) -> None:
        pass

    _toctree = _eval_rst = _include = _text

    def _py(self, block: Block) -> None:
        ast.parse(block.text)

    def _sh(self, block: Block) -> None:
        shlex.split(block.text, comments=True)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def run_alone(command: list[str]) -> tuple[int, str, str]:
    """Exit code and output of another program.

    It may compute for a minute: counted in CPU time, since most of it is imports, which on a machine that does other things
    at the same time take many times as long by the clock. One that waits for ever is ended with its page, in five minutes.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            if sys.platform == "linux":
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err


def not_printed(expected: list[str], printed: str) -> list[str]:
    """The expected lines that do not come, in their order, among the printed ones."""
    lines = iter(re.sub(r"[ \t]+", " ", line).strip() for line in printed.splitlines())
    missing = []
    for line in expected:
        pattern = ".*".join(re.escape(part) for part in re.sub(r"[ \t]+", " ", line).strip().split("..."))
        if not any(re.fullmatch(pattern, found) for found in lines):
            missing.append(line)
            break
    return missing


LONG = {
    "conformance.md": "a pytest for each of its suites; tests/conformance runs them all",
    "reference/commands.md": "every command once; tests/unit/cli runs each",
    "fsdp.md": "runs of several processes; plugins/fsdp/tests/test_run.py",
    "async.md": "runs ahead in many ways; tests/integration/test_async.py",
    "weight_transport.md": "a transport and its kit; tests/conformance/test_transports.py and examples/backends",
    "plugins/processes/README.md": "runs of several processes; tests/integration/test_torchrun.py",
    "megatron.md": "processes that import megatron; plugins/megatron/tests/test_run.py",
    "precision.md": "a run for each type; plugins/torch/tests/test_precision.py",
    "custom_model.md": "a package and its kit; tests/conformance/test_custom_model.py",
    "custom_model_vllm.md": "runs with every sampler; tests/integration/test_custom_models.py",
    "tutorial.md": "two trainings to a result; first_run.md, and tests/integration/test_grpo.py",
    "publishing.md": "a wheel; tests/integration/test_wheels.py",
    "custom_trainers.md": "trainers and their kit; tests/integration/test_expert_iteration.py",
    "custom_algorithms.md": "a pytest for each suite; tests/conformance/test_algorithms.py",
    "environments.md": "runs with tools; tests/integration/test_calculator.py and test_environments.py",
    "plugins/testing/README.md": "a pytest for each of its suites; tests/conformance runs them all",
    "reference/contracts.md": "a pytest; tests/conformance",
}
"""Pages that `make test` leaves to `make test-full`, and what of it covers them meanwhile."""


@pytest.mark.timeout(PAGE_SECONDS, func_only=True)  # the first page of a session would pay for the demo
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=pytest.mark.slow if name in LONG else ())
        for page, name in zip(PAGES, NAMES, strict=True)
    ],
)
def test_every_block_of_a_page_works(page, library, request, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "page"
    shutil.copytree(library, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    for name, value in ENVIRONMENT.get(page.name, {}).items():
        monkeypatch.setenv(name, value)
    if page.name in NEEDS_EXAMPLE:
        monkeypatch.syspath_prepend(request.getfixturevalue("custom_model"))
    session = Session(request.node.callspec.id, folder, capsys, monkeypatch)
    for block in blocks_of(page.read_text("utf-8")):
        session.run(block)
    assert not session.problems, "\n\n".join(session.problems)


def test_every_exception_from_running_is_used_and_every_language_is_known():
    blocks = [block for page in PAGES for block in blocks_of(page.read_text("utf-8"))]
    commands = [command for block in blocks if block.language == "bash" for command, _ in commands_of(block)]
    used = {why for command in commands if (why := reason_not_run(command))}
    assert used == set(NOT_RUN_HERE.values())
    ours = {"bash", "console", "python", "toml", "json", "text"}
    assert set(LONG) < set(NAMES)
    assert {block.language for block in blocks} <= ours | {"py", "sh", "{toctree}", "{eval-rst}", "{include}"}


def test_a_wrong_page_is_caught(library, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    wrong = {
        "bash": "engine frobnicate",
        "console": "$ engine plugins\nno such line",
        "python": "from engine_core import no_such_name",
        "toml": "[data]\nno_such_key = 1",
        "json": "{",
        "py": "def f(:",
        "sh": "echo 'open",
        "rust": "fn main() {}",
    }
    for number, (language, text) in enumerate(wrong.items(), 1):
        session = Session("page.md", tmp_path, capsys, monkeypatch)
        session.run(Block(number, language, "", text + "\n"))
        assert session.problems, language


def anchors(page: Path) -> set[str]:
    """The anchors that a git host and the site give to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if link.startswith(("https://", "http://")):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_keys_in_the_text_are_keys_of_a_run_file():
    """Words such as `rollout.top_p` or `[actor.optim]` in running text."""
    from engine_plugin_tools.commands.schema import installed_specs
    from engine_plugin_tools.schema import json_schema, schema_at

    schema = json_schema(installed_specs())
    tables = "|".join(
        {*EngineConfig.model_fields, "sft", "dpo", "kto", "distill"} - {"options", "trainer", "plugins"}
    )
    own = {"reward.sums", "reward.exact", "actor.gru"}  # names of the examples
    for page in PAGES:
        if page.parent.name == "reference":  # made from the code
            continue
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        if page.name in OTHERS:
            text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
        found = re.findall(rf"`(?:\[+)?((?:{tables})(?:\.[\w]+)+)(?:\]+)?(?: = [^`]+)?`", text)
        for key in {key for key in found if "NAME" not in key and not key.endswith((".toml", ".py"))} - own:
            assert schema_at(schema, key), f"{page.name}: {key}"


def test_the_pages_show_the_examples_as_they_are():
    shown = [block for page in PAGES for block in blocks_of(page.read_text("utf-8"))]
    shown = [block for block in shown if block.file.startswith("examples/")]
    assert len(shown) >= 7
    for block in shown:
        assert (ROOT / block.file).read_text() == block.text, block.file


def documented_metrics() -> list[str]:
    section = (DOCS / "reference" / "metrics.md").read_text("utf-8")
    return [
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall("`(.*?)`", row)
    ]


def as_pattern(metric: str) -> str:
    return re.escape(metric).replace("NAME", "[^/]+").replace("@K", r"@\d+").replace(re.escape("..."), ".+")


def test_every_metric_is_explained_and_every_explained_metric_exists(library, monkeypatch):
    monkeypatch.chdir(library)
    off_policy = {"data.prompts_per_step": 4, "algorithm.mini_batch_prompts": 2, "algorithm.kl_coef": 0.1}
    off_policy |= {"algorithm.kl_in": "reward", "algorithm.advantage": "gae", "run.steps": 1}
    off_policy |= {"eval.at_end": True, "eval.samples_per_prompt": 2, "eval.temperature": 1.0, "eval.k": [2]}
    off_policy |= {"eval.majority": "numeric", "eval.set": [{"name": "more", "path": "data/heldout.jsonl"}]}
    off_policy |= {
        "data.train": [],
        "data.mix": [{"path": f"data/{each}.jsonl", "weight": 1} for each in ("train", "heldout")],
    }
    Trainer(load_config("run.toml", off_policy)).train()
    lines = [line for file in library.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    logged = {metric for line in lines for metric in json.loads(line)}
    patterns = documented_metrics()
    assert len(logged) > 50
    assert [
        metric for metric in logged if not any(re.fullmatch(as_pattern(p), metric) for p in patterns)
    ] == []
    folders = [ROOT / "engine_core", *(folder / "src" for folder in PLUGINS)]
    sources = "".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    for pattern in patterns:
        # a loss names its metrics without "actor/" or "critic/", an objective its maxima with "max/"
        names = (
            pattern.split("NAME")[0],
            f'{pattern.removeprefix("actor/").removeprefix("critic/")}"',
            f'max/{pattern}"',
        )
        in_source = any(f'"{name}' in sources for name in names)
        assert in_source or any(re.fullmatch(as_pattern(pattern), metric) for metric in logged), pattern
