"""train and resume, on a tiny model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine_core.cli import train as command
from engine_core.errors import WorkerLost
from engine_core.plugins import metadata
from engine_core.train.checkpointing import Resume


def steps_of(path):
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_train_prints_the_run_folder_on_stdout_and_progress_on_stderr(engine, sft_run):
    answer = engine("train", "run.toml")
    folder = sft_run.parent / "runs" / "first"
    assert answer.code == 0
    assert answer.out == f"{folder}\n"
    assert answer.err.startswith("Starting: ")  # before torch is imported
    assert "step 2/2" in answer.err
    assert steps_of(folder) == [1, 2]


def test_steps_stands_for_run_steps(engine, sft_run):
    engine("train", "run.toml", "--steps", "1")
    assert steps_of(sft_run.parent / "runs" / "first") == [1]
    answer = engine("train", "run.toml", "--steps", "0")
    assert answer.code == 2
    assert "run.steps: got 0" in answer.err


def test_a_full_disk_is_told_without_a_traceback_wherever_it_is_met(engine, sft_run, monkeypatch):
    monkeypatch.setenv("ENGINE_FAULT", "step.before_metrics@2:nospace")
    answer = engine("train", "run.toml")
    assert answer.code == 5
    assert "engine: [Errno 28] No space left on device" in answer.err
    assert "Traceback" not in answer.err


def test_resume_goes_on_to_the_step_that_is_asked_for(engine, sft_run):
    engine("train", "run.toml")
    answer = engine("resume", "first", "--steps", "4", "--set", "actor.optim.lr=1e-3")
    folder = sft_run.parent / "runs" / "first"
    assert answer.code == 0
    assert answer.out == f"{folder}\n"
    assert steps_of(folder) == [1, 2, 3, 4]
    assert "Not read" not in answer.err  # a resolved config holds every key


@pytest.mark.parametrize(("newest", "force"), [(2, ("model.path",)), (3, ())])
def test_a_restart_from_the_checkpoint_of_the_resume_keeps_what_force_allows(
    monkeypatch, tmp_path, newest, force
):
    tried = []

    def train_from(resume):
        tried.append(resume)
        if len(tried) == 1:
            raise WorkerLost("actor", 0, "here", "killed")

    trainer = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), train=train_from, close=lambda: None)
    monkeypatch.setattr(command, "load_trainer", lambda config: trainer)
    monkeypatch.setattr(Resume, "find", lambda run: Resume(run / f"step_{newest}", {}))
    config = SimpleNamespace(runtime=SimpleNamespace(options=SimpleNamespace(max_restarts=1)))
    command._to_the_end(config, Resume(tmp_path / "step_2", {}, ("model.path",)))
    assert [(resume.path.name, resume.force) for resume in tried[1:]] == [(f"step_{newest}", force)]


def test_resume_asks_for_each_secret_again(engine, sft_run, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "geheimnis")
    (sft_run.parent / "keyed.py").write_text(KEYED)
    keys = ("plugins=['keyed.py']", "plugin.keyed.api_key=secret-of-toml", "plugin.keyed.place=at/geheimnis")
    words = [word for key in keys for word in ("--set", key)]
    assert engine("train", "run.toml", *words).code == 0
    answer = engine("resume", "first", "--steps", "3")
    assert answer.code == 2
    for key in ("plugin.keyed.api_key", "plugin.keyed.place"):
        assert (
            f"{key}: the run's config has [redacted] for a secret. Set it again: --set {key}=..."
            in answer.err
        )
    assert engine("resume", "first", "--steps", "3", *words[2:]).code == 0


KEYED = """
from engine_core import hookimpl
from engine_core.specs import Options

class Keyed(Options):
    api_key: str = ""
    place: str = ""

@hookimpl
def engine_options():
    return Keyed
"""


def test_resume_of_a_finished_run_says_so_and_is_no_error(engine, sft_run):
    engine("train", "run.toml")
    answer = engine("resume", "latest")
    assert answer.code == 0
    more = "To continue: engine resume latest --steps N, N over 2.\n"
    assert answer.err == f"Nothing to do: step 2 is done, and run.steps is 2. {more}"
    answer = engine("resume", "latest", "--steps", "1")
    assert (answer.code, answer.err) == (0, f"Nothing to do: step 2 is done, and run.steps is 1. {more}")


def test_resume_of_an_unknown_run_lists_the_runs(engine, sft_run):
    engine("train", "run.toml", "--steps", "1")
    answer = engine("resume", "frist")
    assert answer.code == 4
    assert answer.err.startswith("engine: No run at 'frist'")
    assert "Did you mean 'first'?" in answer.err


def test_resume_names_runs_in_a_folder_below_when_there_are_none_here(engine, sft_run, monkeypatch):
    engine("train", "run.toml", "--steps", "1")
    monkeypatch.chdir(sft_run.parent.parent)
    answer = engine("resume", "latest")
    assert f"{sft_run.parent.name}/runs/first, " in answer.err.partition("Known: ")[2]


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ((), "Roles in this process: actor, rollout"),
        (("runtime.backend=torchrun",), "Roles in one process for each GPU: actor, rollout"),
        (
            ("runtime.backend=torchrun", "runtime.torchrun.processes=2", "actor.backend=fsdp"),
            "Roles in 2 process(es): actor, rollout",
        ),
        (
            (
                "runtime.backend=torchrun",
                "actor.backend=fsdp",
                "placement.pools={train=2,serve=1}",
                "placement.actor=train",
                "placement.rollout=serve",
            ),
            "Pool train, processes 0 to 1: actor\nPool serve, process 2: rollout",
        ),
    ],
)
def test_a_dry_run_prints_which_roles_share_which_processes(engine, rl_run, settings, layout):
    answer = engine("train", "rl.toml", "--dry-run", *(word for key in settings for word in ("--set", key)))
    assert answer.code == 0
    assert layout in answer.out


def test_a_dry_run_refuses_an_engine_of_one_process_in_a_pool_of_several(engine, rl_run):
    pools = ("placement.pools={train=8,serve=8}", "placement.actor=train", "placement.rollout=serve")
    for keys in (("runtime.torchrun.processes=8",), pools):
        settings = (word for key in ("runtime.backend=torchrun", *keys) for word in ("--set", key))
        answer = engine("train", "rl.toml", "--dry-run", *settings)
        assert answer.code == 2
        assert "actor.backend = 'torch' trains in one process, and the pool of 'actor' has 8." in answer.err


def test_a_dry_run_on_the_local_runtime_says_that_pools_are_not_read(engine, rl_run):
    pools = ("placement.pools={train=8,serve=8}", "placement.actor=train", "placement.rollout=serve")
    answer = engine("train", "rl.toml", "--dry-run", *(word for key in pools for word in ("--set", key)))
    assert answer.code == 0
    assert "[placement]: runtime 'local' has one pool, this process" in answer.out + answer.err


MISFITS = [
    (
        ("actor.lora={target_modules=['q_porj']}",),
        r"actor\.lora\.target_modules: 'q_porj' is no layer of this model\. Did you mean 'q_proj'\?",
    ),
    (
        ("actor.backend=fsdp", "runtime.torchrun.processes=3", "actor.fsdp.tp=3"),
        r"actor\.fsdp\.tp is 3, which does not divide the model's",
    ),
    (
        ("actor.backend=fsdp", "runtime.torchrun.processes=4", "actor.fsdp.sp=3"),
        r"actor\.fsdp\.sp is 3, which does not divide the 4 ranks of this run",
    ),
    (
        ("actor.backend=megatron", "runtime.torchrun.processes=3", "actor.megatron.tp=3"),
        r"\[actor\.megatron\] tp is 3, which does not divide",
    ),
]


@pytest.mark.parametrize(("keys", "said"), MISFITS, ids=[keys[0] for keys, _ in MISFITS])
def test_a_dry_run_refuses_what_does_not_fit_the_model(engine, rl_run, keys, said):
    settings = (word for key in ("runtime.backend=torchrun", *keys) for word in ("--set", key))
    answer = engine("train", "rl.toml", "--dry-run", *settings)
    assert answer.code == 2
    assert re.search(said, answer.err), answer.err


def test_a_dry_run_prints_the_derived_numbers_and_writes_nothing(engine, rl_run):
    before = set(rl_run.parent.iterdir())
    answer = engine("train", "rl.toml", "--dry-run", "--set", "run.epochs=2")
    assert answer.code == 0
    assert "2 steps of 4 rows x 3 responses = 12 rollouts" in answer.out
    assert "1 optimizer step(s) each, 2 in all," in answer.out
    assert "as many tokens a micro-batch as fit" in answer.out
    assert set(rl_run.parent.iterdir()) - before <= {rl_run.parent / "__pycache__"}


CODE = """
[reward.code]
min_isolation = "limits"
block = "whole"
"""


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({}, "", "rows.jsonl:1: reward 'code' finds no tests: the row has no value in a column 'tests' or"),
        ({"tests": "5"}, "", "rows.jsonl:1: reward 'code' cannot use the tests in column 'tests': code that"),
        ({}, '[[reward]]\nname = "digits"\n', "None of the 16 rows that were looked at has any."),
    ],
)
def test_rows_of_which_a_reward_makes_nothing_are_refused_before_a_model_is_built(
    engine, rl_run, row, more, message
):
    rows = [{"prompt": f"{i}+{i}=", "response": "", **row} for i in range(16)]
    (rl_run.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rl_run.write_text(rl_run.read_text().replace('name = "digits"', f'name = "code"{CODE}{more}'))
    for dry in (["--dry-run"], []):
        answer = engine("train", "rl.toml", *dry)
        assert (answer.code, message in answer.err) == (4, True), answer.err


def test_held_out_rows_of_which_a_reward_makes_nothing_are_refused_too(engine, rl_run):
    rows = [{"prompt": f"{i}+{i}=", "tests": "assert f() == 1"} for i in range(16)]
    (rl_run.parent / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rl_run.write_text(rl_run.read_text().replace('name = "digits"', f'name = "code"{CODE}'))
    sets = ["--set", 'data.train="good.jsonl"', "--set", "eval.at_end=true"]
    answer = engine("train", "rl.toml", "--dry-run", *sets)
    assert (answer.code, "rows.jsonl:1: reward 'code' finds no tests" in answer.err) == (4, True), answer.err


def test_a_dry_run_without_its_part_is_refused_with_the_distribution_to_install(engine, sft_run, monkeypatch):
    there = [offer for offer in metadata.installed() if offer.name != "dry_run"]
    monkeypatch.setattr("engine_core.plugins.metadata.installed", lambda: tuple(there))
    answer = engine("train", "run.toml", "--dry-run")
    assert answer.code == 3
    assert answer.err == "engine: Part 'dry_run' is not installed. Try: pip install engine-plugin-tools\n"


def test_a_dry_run_says_what_is_not_read(engine, sft_run):
    sft_run.write_text(sft_run.read_text() + "\n[actor.fsdp]\nsharding = 'full'\n")
    assert "not read: [actor.fsdp]: the run uses 'torch'" in engine("train", "run.toml", "--dry-run").out


def test_what_is_missing_is_told_before_anything_starts(engine, sft_run):
    answer = engine(
        "train", "run.toml", "--set", 'data.train="gone.jsonl"', "--set", 'data.validation="lost.jsonl"'
    )
    assert answer.code == 4
    assert "data.train: there is no file" in answer.err
    assert "data.validation: there is no file" in answer.err
    assert not (sft_run.parent / "runs").exists()


def test_a_plugin_file_elsewhere_needs_allow_code(engine, rl_run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "dice.py"
    (rl_run.parent / "dice.py").rename(elsewhere)
    words = ["train", "rl.toml", "--dry-run", "--set", f"plugins=['{elsewhere}']"]
    answer = engine(*words)
    assert answer.code == 3
    assert "lies outside the run file's folder" in answer.err
    assert "allow it with --allow-code" in answer.err
    assert engine(*words, "--allow-code").code == 0


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 75)]
)
def test_a_signal_saves_and_ends_training_and_its_reward_workers(rl_run, number, code):
    words = [sys.executable, "-m", "engine_core.cli.main", "train", "rl.toml", "--steps", "100000"]
    quiet = ["--set", "tracking.rollouts_every_steps=0", "--set", "checkpoint.every_steps=0"]
    with subprocess.Popen(
        [*words, *quiet], cwd=rl_run.parent, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert any(line.startswith("step ") for line in child.stderr)
        child.send_signal(number)
        said = child.stderr.read()  # to its end: nobody holds the pipe any more
        assert child.wait(timeout=30) == code
    assert "Traceback" not in said
    assert "Stopped by" in said
    assert "Resume: engine resume" in said


def test_a_signal_while_plugins_are_imported_is_no_plugin_that_is_broken(rl_run):
    (rl_run.parent / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    words = [sys.executable, "-m", "engine_core.cli.main", "train", "rl.toml", "--set", "plugins=['slow.py']"]
    done = subprocess.run(words, cwd=rl_run.parent, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (143, "")


def test_rows_that_are_all_too_long_are_said_to_be(engine, rl_run):
    for dry in (["--dry-run"], []):
        answer = engine("train", "rl.toml", "--set", "data.max_prompt_tokens=1", *dry)
        assert answer.code == 4
        assert "None of the 16 rows is usable. Last: rows.jsonl:16: " in answer.err


def test_the_largest_seed_trains(engine, sft_run):
    seed = 2**63 - 1
    answer = engine("train", "run.toml", "--set", f"run.seed={seed}", "--set", f"model.seed={seed}")
    assert answer.code == 0, answer.err
    answer = engine("train", "run.toml", "--set", f"run.seed={seed + 1}")
    assert (answer.code, "run.seed: got 9223372036854775808, expected" in answer.err) == (2, True)


@pytest.mark.parametrize("runtime", ["local", "torchrun"])
def test_an_engine_of_a_plugin_that_raises_is_named_with_its_line(engine, rl_run, runtime):
    dice = rl_run.parent / "dice.py"
    dice.write_text(dice.read_text().replace("    def step(self):\n", "    def step(self):\n        [][1]\n"))
    answer = engine("train", "rl.toml", "--set", f"runtime.backend={runtime}")
    assert answer.code == 3, answer.err
    assert "dice.py" in answer.err
    assert f"failed: IndexError: list index out of range ({dice}:18: [][1])" in answer.err
    assert "Traceback" not in answer.err
    log = next((rl_run.parent / "runs").glob("*/logs/attempt_0/run.log")).read_text()
    assert "IndexError" in log
    assert "in step" in log


def test_lack_of_memory_in_a_plugin_is_not_its_failure(engine, rl_run):
    dice = rl_run.parent / "dice.py"
    dice.write_text(
        dice.read_text().replace("    def step(self):\n", "    def step(self):\n        raise MemoryError\n")
    )
    answer = engine("train", "rl.toml")
    assert answer.code == 5
    assert "Out of memory in step 1" in answer.err


def test_train_names_a_plugin_that_is_not_installed(engine, rl_run, without_our_plugins):
    answer = engine("train", "rl.toml", "--set", "actor.backend=megatron")
    assert answer.code == 3
    assert answer.err == (
        "engine: --set actor.backend: Train engine 'megatron' is not installed. Try: pip install engine-plugin-megatron\n"
    )
    answer = engine("train", "run.toml")
    assert answer.code == 3
    assert answer.err == (
        "engine: run.toml:2: trainer: Trainer 'sft' is not installed. Try: pip install engine-plugin-trainers\n"
    )
