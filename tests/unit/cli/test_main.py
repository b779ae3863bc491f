"""How the command line finds a command, and how a command ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from engine_core import __version__
from engine_core.plugins.metadata import known_names

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "numpy", "matplotlib", "rich")

ALL = [name.replace(".", " ") for name in known_names("commands")]


def test_the_version_is_that_of_the_core(engine):
    assert engine("--version") == (0, f"engine {__version__}\n", "")


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_help_that_says_what_it_does(engine, command):
    answer = engine(*command.split(), "--help")
    assert answer.code == 0
    assert f"Usage: engine {command}" in answer.out
    assert len(answer.out.splitlines()[2].strip()) > 20
    assert "Raises:" not in answer.out


def test_no_words_print_the_help(engine):
    answer = engine()
    assert answer.code == 0
    assert "Post-training of language models" in answer.out
    assert all(name.split()[0] in answer.out for name in ALL)


def test_an_unknown_command_suggests_the_nearest(engine):
    answer = engine("trian")
    assert answer.code == 2
    assert answer.err.startswith("engine: Unknown command 'trian'. Did you mean 'train'? Known: bench.")
    assert "Unknown command 'new.plugn'. Did you mean 'new.plugin'? Known: " in engine("new", "plugn").err


def test_a_wrong_option_or_a_missing_argument_names_the_help(engine):
    answer = engine("plugins", "--jsn")
    assert answer.code == 2
    assert "No such option: --jsn" in answer.err
    assert "--json" in answer.err
    assert "See 'engine plugins --help'." in answer.err
    assert engine("new", "plugin") == (
        2,
        "",
        "engine: Missing argument 'NAME'. See 'engine new plugin --help'.\n",
    )


COMMAND = """
from engine_core import hookimpl
from engine_core.specs import Command

@hookimpl
def engine_commands():
    return {"NAME": Command(load="a_command:run")}
"""


@pytest.fixture
def command(install) -> Callable[..., dict[str, str]]:
    """``command(name, body)`` installs a command with this body; the environment in which a process finds it."""

    def offer(name: str, body: str) -> dict[str, str]:
        plugin = COMMAND.replace("NAME", name)
        body = textwrap.indent(textwrap.dedent(body), "    ")
        modules = {"a_plugin": plugin, "a_command": f"def run():\n{body}\n"}
        site = install("a-distribution", {"commands": {name: "a_plugin"}}, modules)
        return {**os.environ, "PYTHONPATH": str(site)}

    return offer


def test_an_engine_error_is_its_message_and_its_exit_code(engine, command):
    command(
        "fail",
        """
        "Fails."
        from engine_core.errors import TrainingFailed
        raise TrainingFailed("Loss is not finite.\\nLower actor.optim.lr.")
        """,
    )
    assert engine("fail") == (6, "", "engine: Loss is not finite.\nengine: Lower actor.optim.lr.\n")


def test_anything_else_passes_through_with_its_traceback(engine, command):
    command("fail", "raise ZeroDivisionError('a bug')")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine("fail")


def test_an_interrupt_ends_with_130(engine, command):
    command("fail", "raise KeyboardInterrupt")
    assert engine("fail").code == 130


def test_a_bug_ends_the_process_with_1_and_a_traceback(command):
    environment = command("fail", "raise ZeroDivisionError('a bug')")
    words = [sys.executable, "-m", "engine_core.cli.main", "fail"]
    child = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert child.returncode == 1
    assert "Traceback" in child.stderr
    assert "ZeroDivisionError: a bug" in child.stderr


def test_a_crash_in_native_code_shows_the_plugins_line(command):
    environment = command("fail", "import ctypes\nctypes.string_at(0)")
    words = [sys.executable, "-m", "engine_core.cli.main", "fail"]
    child = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert child.returncode == -signal.SIGSEGV
    assert re.search(r'a_command\.py", line 3 in run', child.stderr)


def test_a_command_of_a_plugin_is_used_and_shown_as_the_cores_are(engine, command):
    command("wave", "'Wave at who asks, once.'\nprint('hello')")
    assert engine("wave") == (0, "hello\n", "")
    assert engine("a-distribution:wave") == (0, "hello\n", "")
    assert re.search(r"wave +Wave at who asks, once\.", engine("--help").out)
    assert engine("waev").err.startswith("engine: Unknown command 'waev'. Did you mean 'wave'? Known: bench.")


def test_a_command_of_a_plugin_joins_a_group_or_makes_one(engine, command):
    command("hands.wave", "'Wave.'\nprint('hello')")
    assert engine("hands", "wave") == (0, "hello\n", "")
    assert re.search(r"hands +Commands: wave\.", engine("--help").out)
    assert "Unknown command 'hands.wvae'. Did you mean 'hands.wave'?" in engine("hands", "wvae").err


def test_a_broken_plugin_hurts_its_own_command_alone(engine, install):
    install("broken-one", {"commands": {"wave": "broken_one"}}, {"broken_one": "import absent_module"})
    answer = engine("wave", "--hands", "2")
    assert answer.code == 3
    assert "Plugin 'wave' (broken-one 1.0) is broken, it does not import" in answer.err
    assert "absent_module" in answer.err
    helped = engine("--help")
    assert helped.code == 0
    assert re.search(r"wave +Cannot be used: Plugin 'wave' \(broken-one 1\.0\) is", helped.out)
    assert re.search(r"train +Train as the run file says", helped.out)


def test_a_command_that_two_plugins_offer_is_picked_by_its_distribution(engine, install):
    for letter in "ab":
        plugin = COMMAND.replace("NAME", "wave").replace("", "").replace("a_command", f"{letter}_body")
        body = f"def run():\n    'Wave at who asks, once.'\n    print('{letter}')\n"
        modules = {f"{letter}_plugin": plugin, f"{letter}_body": body}
        install(f"{letter}-hands", {"commands": {"wave": f"{letter}_plugin"}}, modules)
    assert engine("wave") == (
        3,
        "",
        "engine: Command 'wave' is offered by a-hands 1.0 and by b-hands 1.0. Write 'a-hands:wave' or 'b-hands:wave'.\n",
    )
    assert engine("b-hands:wave") == (0, "b\n", "")


def test_a_command_of_ours_that_is_not_installed_names_its_distribution(engine, without_our_plugins):
    assert engine("report") == (
        2,
        "",
        "engine: Command 'report' is not installed. Try: pip install engine-plugin-tools\n",
    )
    assert engine("bench", "step").err.endswith("It is not installed: pip install engine-plugin-tools\n")
    assert engine("reprot").err == (
        "engine: Unknown command 'reprot'. Did you mean 'report'? Known: report, "
        "resume, train. It is not installed: pip install engine-plugin-tools\n"
    )


def test_sigterm_ends_with_143_and_leaves_through_the_finally_blocks(command):
    environment = command(
        "wait",
        """
        import time
        try:
            print("ready", flush=True); time.sleep(60)
        finally:
            print("closed", flush=True)
        """,
    )
    words = [sys.executable, "-m", "engine_core.cli.main", "wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "closed\n"
        assert child.wait(timeout=10) == 143


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_traceback(unbuffered):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "engine_core.cli.main", "plugins"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    child = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    os.close(write)
    assert child.stderr == ""
    assert child.returncode == 1


def loaded_by(command, folder):
    """Return the modules that a process has loaded at the end of a command."""
    code = f"import sys; from engine_core.cli.main import main; main({command!r}); print(*sys.modules, file=sys.stderr)"
    words = [sys.executable, "-c", code]
    child = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=60)
    return set(child.stderr.split())


@pytest.mark.parametrize(
    "command",
    [
        ["plugins"],
        ["validate", "run.toml"],
        ["schema"],
        ["--help"],
        ["resume", "nosuch"],
        ["report", "nosuch"],
    ],
)
def test_quick_commands_import_nothing_heavy(sft_run, command):
    loaded = loaded_by(command, sft_run.parent)
    assert "engine_core.cli.main" in loaded
    assert not loaded & set(HEAVY)


def test_a_finished_run_is_resumed_and_stored_rollouts_are_shown_without_torch(engine, rl_run):
    assert engine("train", "rl.toml", "--set", "eval.every_steps=1").code == 0
    assert engine("train", "run.toml", "--set", "run.name=second").code == 0
    commands = [["resume", "second"], ["inspect", "rollouts", "first"], ["compare", "first", "first"]]
    for command in commands:
        loaded = loaded_by(command, rl_run.parent)
        assert "numpy" in loaded, command
        assert not loaded & {"torch", "transformers"}, command


def test_the_list_of_plugins_is_read_from_metadata_alone(tmp_path):
    loaded = loaded_by(["plugins"], tmp_path)
    assert "engine_plugin_tools.plugin_list" in loaded
    assert {m.partition(".")[0] for m in loaded if m.startswith("engine_plugin_")} == {"engine_plugin_tools"}


def test_a_key_that_is_given_as_an_option_is_led_to_set(engine, sft_run):
    answer = engine("train", "run.toml", "--run.steps=3")
    assert answer.code == 2
    assert "A key is set by --set run.steps=VALUE. See 'engine train --help'." in answer.err
    assert "--set" not in engine("validate", "run.toml", "--jsno").err.partition("Possible")[0]


@pytest.mark.parametrize("command", [[], ["train"], ["bench"], ["bench", "step"]])
def test_h_is_help(engine, command):
    assert engine(*command, "-h").out == engine(*command, "--help").out != ""


def test_native_caches_by_shape_are_bounded_unless_the_user_says_otherwise(engine, monkeypatch):
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "2048")
    engine("--version")
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "2048"
