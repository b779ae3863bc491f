"""``engine serve-reward`` as a process of its own, asked by a run's ``http`` reward."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from engine_core import Trainer, load_config
from engine_core.cli.main import main
from engine_core.errors import TrainingFailed
from engine_core.runs.rollout_files import read_rollouts


@pytest.fixture(scope="module")
def scorer(world, tmp_path_factory):
    """A reward model's folder with random weights and the world's tokenizer."""
    folder = tmp_path_factory.mktemp("scorer")
    config = AutoConfig.from_pretrained(world / "model")
    config.num_labels, config.initializer_range = 1, 0.2
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(folder)
    return folder


@pytest.fixture
def serve():
    """``serve(FOLDER, ...)``: the process and its address; killed at the end if it still runs.

    ``before`` is called in the new process before the program starts.
    """
    running = []

    def start(*arguments, before=None):
        command = [
            sys.executable,
            "-m",
            "engine_core.cli.main",
            "serve-reward",
            *map(str, arguments),
            "--port",
            "0",
        ]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=before)
        running.append(process)
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/score", url), process.communicate()
        return process, url

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_runs_http_reward_is_the_in_process_reward_bit_for_bit(grpo, scorer, serve, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "a-token-of-some-length")
    process, url = serve(scorer, "--token-env", "SCORER_TOKEN")
    tables = [
        {"name": "here", "model": {"path": str(scorer), "reuse_token_ids": False}},
        {
            "name": "http",
            "timeout_seconds": 60.0,
            "http": {"url": url, "token_env": "SCORER_TOKEN", "attempt_timeout_seconds": 30.0},
        },
    ]
    run = Trainer(load_config(overrides=grpo | {"reward": tables, "rollout.overlap_rewards": False}))
    run.train()
    run.close()
    files = sorted(run.folder.rollouts_dir.glob("*.parquet"))
    rollouts = [rollout for file in files for rollout in read_rollouts(file)]
    here, there = ([r.rewards[name] for r in rollouts] for name in ("here", "http"))
    assert len(files) == 2
    assert here == there  # equal, not nearly: the same samples in one call
    assert len(set(here)) > len(here) / 2
    monkeypatch.setenv("SCORER_TOKEN", "another-token-altogether")
    with pytest.raises(TrainingFailed, match=r"status 401: .*the token is missing or wrong"):
        Trainer(load_config(overrides=grpo | {"reward": tables[1:], "run.name": "wrong"})).train()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"stopped after {len(rollouts)} samples\n")
    written = "".join(
        p.read_text(errors="ignore")
        for p in run.folder.path.rglob("*")
        if p.suffix in (".toml", ".log", ".json")
    )
    assert "SCORER_TOKEN" in written
    assert "a-token-of-some-length" not in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 is open to other machines: it needs --token-env as well.",
        ),
        (
            ["--token-env", "NO_SUCH_TOKEN"],
            "--token-env: $NO_SUCH_TOKEN must hold a token of 16 characters or more",
        ),
        (
            ["--set", "reward.reward.model.pth=1"],
            "reward.reward.model.pth: unknown key. Did you mean 'path'?",
        ),
    ],
)
def test_what_must_not_be_served_is_refused(scorer, capsys, arguments, message):
    assert main(["serve-reward", str(scorer), "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_language_models_folder_is_no_reward(world, capsys):
    assert main(["serve-reward", str(world / "model")]) == 4
    assert "ForCausalLM, which gives no score" in capsys.readouterr().err


@pytest.mark.parametrize(
    "handling",
    [
        pytest.param(signal.SIG_DFL, id="shell"),
        pytest.param(signal.SIG_IGN, id="background_job", marks=pytest.mark.slow),
    ],
)
def test_a_reward_of_a_plugin_is_served_by_its_name_until_ctrl_c(serve, tmp_path, handling):
    """Also where it was started with SIGINT ignored, as shells start what they run in the background."""
    import http.client

    (tmp_path / "run.toml").write_text('[[reward]]\nname = "numeric"\n[reward.numeric]\ntolerance = 0.5\n')
    process, url = serve(tmp_path / "run.toml", before=lambda: signal.signal(signal.SIGINT, handling))
    host, path = url.removeprefix("http://").split("/")
    body = json.dumps({"prompts": ["Q"] * 2, "completions": ["4.4", "5"], "columns": {"answer": ["4", "4"]}})
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", f"/{path}", body, {"Content-Type": "application/json"})
    assert json.loads(connection.getresponse().read()) == {"scores": [1.0, 0.0], "errors": {}}
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "stopped after 2 samples\n"
    assert process.returncode == 0
