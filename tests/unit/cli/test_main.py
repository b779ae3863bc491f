"""How the command line finds a command, and how a command ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from engine_core import __version__
from engine_core.cli import main as command_line
from engine_core.cli.main import COMMANDS
from engine_core.errors import TrainingFailed

HEAVY = ("torch", "transformers", "datasets", "numpy", "matplotlib", "rich")


ALL = [
    command
    for name, entry in COMMANDS.items()
    for command in ([name] if isinstance(entry, str) else [f"{name} {inner}" for inner in entry])
]


def test_the_version_is_that_of_the_core(engine):
    assert engine("--version") == (0, f"engine {__version__}\n", "")


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_help_that_says_what_it_does(engine, command):
    answer = engine(*command.split(), "--help")
    assert answer.code == 0
    assert f"Usage: engine {command}" in answer.out
    assert len(answer.out.splitlines()[2].strip()) > 20


def test_no_words_print_the_help(engine):
    answer = engine()
    assert answer.code == 0
    assert "Post-training of language models" in answer.out
    assert all(name in answer.out for name in COMMANDS)


def test_an_unknown_command_suggests_the_nearest(engine):
    answer = engine("trian")
    assert answer.code == 2
    assert answer.err.startswith(
        "engine: Unknown command 'trian'. Did you mean 'train'? Known: bench, compare, config, doctor,"
    )
    assert engine("new", "plugn").err == (
        "engine: Unknown command 'plugn'. Did you mean 'plugin'? Known: plugin, run.\n"
    )


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


def _ending(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setitem(sys.modules, "a_command", type(sys)("a_command"))
    monkeypatch.setattr(sys.modules["a_command"], "fail", fail, raising=False)
    table = {**COMMANDS, "fail": "a_command:fail"}
    monkeypatch.setattr(command_line.CommandGroup.__init__, "__kwdefaults__", {"table": table})


def test_an_engine_error_is_its_message_and_its_exit_code(engine, monkeypatch):
    _ending(monkeypatch, TrainingFailed("Loss is not finite.\nLower actor.optim.lr."))
    assert engine("fail") == (6, "", "engine: Loss is not finite.\nengine: Lower actor.optim.lr.\n")


def test_anything_else_passes_through_with_its_traceback(engine, monkeypatch):
    _ending(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine("fail")


def test_an_interrupt_ends_with_130(engine, monkeypatch):
    _ending(monkeypatch, KeyboardInterrupt())
    assert engine("fail").code == 130


def test_a_bug_ends_the_process_with_1_and_a_traceback():
    code = "from engine_core.cli import main; main.COMMANDS['new']['run'] = 'engine_core:gone'; main.main(['new', 'run'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert "Traceback" in child.stderr


def test_sigterm_ends_with_143_and_leaves_through_the_finally_blocks(tmp_path):
    code = (
        "import sys, time, types; from engine_core.cli import main\n"
        "def wait():\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        print('closed', flush=True)\n"
        "sys.modules['w'] = types.SimpleNamespace(wait=wait)\n"
        "main.COMMANDS['wait'] = 'w:wait'\n"
        "sys.exit(main.main(['wait']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
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


@pytest.mark.parametrize("command", [["plugins"], ["validate", "run.toml"], ["schema"], ["--help"]])
def test_quick_commands_import_nothing_heavy(sft_run, command):
    code = f"import sys; from engine_core.cli.main import main; main({command!r}); print(*sys.modules, file=sys.stderr)"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=sft_run.parent, timeout=60
    )
    loaded = set(child.stderr.split())
    assert "engine_core.cli.main" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(("command", "seconds"), [(["plugins"], 0.5), (["validate", "run.toml"], 1.0)])
def test_quick_commands_need_little_time(sft_run, command, seconds):
    """Time of the processor, not of the clock: other work on the machine must not decide."""
    words = [sys.executable, "-m", "engine_core.cli.main", *command]
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, capture_output=True, cwd=sft_run.parent, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < seconds, f"{times} seconds, {seconds} are allowed"
