"""The examples do what they say: the one-file plugin trains, and the demo goes from nothing to a report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from engine_core.cli.main import main
from engine_core.runs.rollout_files import read_rollouts

ROOT = Path(__file__).parents[2]
LAST_LINE = r"held-out accuracy (\d\.\d\d) -> (\d\.\d\d)"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def before_and_after(printed):
    found = re.fullmatch(LAST_LINE, printed.strip().splitlines()[-1])
    assert found, printed[-2000:]
    return float(found[1]), float(found[2])


def test_the_one_file_plugin_trains(demo, tmp_path, monkeypatch):
    root, _ = demo
    settings = [f"run.dir={json.dumps(str(tmp_path))}", "run.name=one", "run.steps=2"]
    settings += ["data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_response_tokens=24"]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", str(root / "examples" / "one_file_plugin" / "run.toml"), *sets]) == 0
    for line in metrics(tmp_path / "one"):
        responses = read_rollouts(tmp_path / "one" / "rollouts" / f"step_{line['step']:06d}.parquet")
        assert line["reward/short"] == pytest.approx(mean(len(r.text.split()) <= 8 for r in responses))
    env = json.loads((tmp_path / "one" / "env.json").read_text())
    assert env["plugins"]["short.py"].startswith("sha256:")


def test_the_last_line_of_the_demo_is_the_accuracy_before_and_after(demo):
    root, printed = demo
    lines = metrics(root / "demo" / "runs" / "grpo")
    known = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert before_and_after(printed) == (round(known[0], 2), round(known[-1], 2))


def test_the_demo_shows_each_command_and_samples_before_and_after(demo):
    _, printed = demo
    assert re.findall(r"^\$ engine (\w+)", printed, re.MULTILINE) == [
        "train",
        "export",
        "train",
        "export",
        "report",
    ]
    assert len(re.findall(r"^    (?:right|wrong): ", printed, re.MULTILINE)) == 6


def test_the_demo_leaves_a_report_curves_and_a_checkpoint(demo):
    folder = demo[0] / "demo"
    report = (folder / "report.html").read_text()
    assert "reward" in report
    assert not re.search(r'(?:src|href)="https?:', report)  # nothing is fetched
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "runs" / "grpo" / "checkpoints" / "step_00000010" / "manifest.json").exists()


def test_the_exported_model_answers_through_transformers_alone(demo):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo[0] / "demo" / "trained"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(
        "Mia has 7 marbles. She finds 5 more. How many marbles does Mia have now?\n", return_tensors="pt"
    )
    out = model.generate(ids.input_ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.input_ids.shape[1]
    assert (out < len(tokenizer)).all()


def test_the_demo_leaves_a_folder_alone_that_it_did_not_make(demo, run_demo, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run_demo(demo[0], "--folder", tmp_path)
    assert done.returncode == 5
    assert "was not made by the demo. Move it away or choose another with --folder." in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_the_control_runs_with_the_rewards_dealt_out_at_random(demo, run_demo, tmp_path):
    folder = tmp_path / "control"
    done = run_demo(demo[0], "--control", "--folder", folder, "--sft-steps", 1, "--steps", 2)
    assert done.returncode == 0, done.stderr
    before_and_after(done.stdout)
    run = folder / "runs" / "control"
    assert "shuffled_rewards" in (run / "config.resolved.toml").read_text()
    assert "shuffled_rewards.py" in json.loads((run / "env.json").read_text())["plugins"]


def test_shuffled_rewards_are_the_same_rewards_on_other_rollouts(demo):
    from runpy import run_path
    from types import SimpleNamespace

    shuffle = run_path(str(demo[0] / "demo" / "shuffled_rewards.py"))["shuffle"]
    rollouts = [SimpleNamespace(reward=float(i)) for i in range(32)]
    shuffle(rollouts, step=3)
    assert sorted(r.reward for r in rollouts) == [float(i) for i in range(32)]
    assert [r.reward for r in rollouts] != [float(i) for i in range(32)]


@pytest.mark.slow  # the kit on a custom model: tests/conformance/test_custom_model.py; the page on it: test_docs.py
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_the_custom_models_pass_their_own_tests_as_an_installed_wheel(custom_model, tmp_path, which):
    tests = ROOT / "examples" / "custom_model" / "tests"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(tests)],
        env={**os.environ, "PYTHONPATH": f"{custom_model}:{ROOT}", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b([5-9]\d|\d{3}) passed", done.stdout), done.stdout  # the conformance kit among them


@pytest.mark.slow
def test_the_backends_pass_the_conformance_kit():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/backends"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b([5-9]\d|\d{3}) passed", done.stdout), done.stdout


# The demo as it is, and runs that differ from it in a word of the run file: all of them after its one warm start. With
# all cores, since that is how it is used.


@pytest.fixture(scope="module")
def learned(demo, run_demo, tmp_path_factory):
    """The folder of a whole demo, and what it printed."""
    folder = tmp_path_factory.mktemp("learned") / "demo"
    done = run_demo(demo[0], "--folder", folder, small=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def train_as(learned):
    """``train_as("fsdp", "run.seed=1", ...)``: lines of the metrics of a run by that file, and what it said."""

    def train(file, *settings):
        folder = learned[0]
        places = [
            f"run.dir={folder}/runs",
            f"model.path={folder}/sft",
            f"data.train={folder}/data/train.jsonl",
        ]
        places += [f"data.validation={folder}/data/heldout.jsonl", f"run.name={file}-after-the-demo"]
        sets = [word for setting in (*places, *settings) for word in ("--set", setting)]
        path = folder / f"{file}.toml"
        done = subprocess.run(
            [sys.executable, "-m", "engine_core.cli.main", "train", str(path), *sets],
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return metrics(folder / "runs" / f"{file}-after-the-demo"), done.stderr

    return train


def accuracies(lines):
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_the_demo_learns(learned):
    before, after = before_and_after(learned[1])
    assert before <= 0.40
    assert after >= 0.92  # 0.94 to 0.97 with other seeds


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_the_one_file_plugin_learns_to_be_short(learned, tmp_path):
    folder = learned[0]
    settings = [f"model.path={folder}/sft", f"data.train={folder}/data/train.jsonl"]
    settings += [f"run.dir={tmp_path}", "run.name=short"]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", str(ROOT / "examples" / "one_file_plugin" / "run.toml"), *sets]) == 0
    rewards = [line["reward/short"] for line in metrics(tmp_path / "short")]
    assert len(rewards) == 20
    assert sum(rewards[:5]) / 5 < 0.7
    assert sum(rewards[-3:]) / 3 > 0.85


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_the_control_does_not_learn(train_as):
    lines, _ = train_as("control")
    before, *_, after = accuracies(lines)
    assert after <= before + 0.10


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_the_demo_learns_as_much_on_two_sharded_processes(train_as):
    lines, said = train_as("fsdp")
    assert "gathered for the phase" in said
    before, *_, after = accuracies(lines)
    assert before < 0.35
    assert after > 0.8


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_the_demo_learns_as_much_with_rollouts_that_run_ahead(train_as):
    """A sampler in a process of its own that is one version behind."""
    lines, _ = train_as("ahead")
    before, *_, after = accuracies(lines)
    assert before <= 0.40
    assert after >= 0.92  # the bounds of the synchronous demo
    assert max(line.get("async/staleness_max", 0) for line in lines) == 1
