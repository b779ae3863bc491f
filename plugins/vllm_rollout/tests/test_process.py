"""vLLM in a process of its own: the samples of the trainer's process, bit for bit, also where it is killed."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from engine_core import load_config
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_plugin_testing.reference import write_model

FRAGILE = """
import os, signal
from pathlib import Path
from engine_core import hookimpl
from engine_core.specs import RolloutBackend
from engine_plugin_vllm_rollout.engine import VLLMRolloutEngine
from engine_plugin_vllm_rollout.plugin import VLLMOptions

PIDS = Path(__file__).with_name("pids")


class Fragile(VLLMRolloutEngine):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        with PIDS.open("a") as file:
            print(os.getpid(), file=file)

    def step(self):
        finished = super().step()
        if self.version == 1 and len(PIDS.read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return finished


@hookimpl
def engine_rollout_engines():
    return {"fragile": RolloutBackend(load=Fragile, config=VLLMOptions)}
"""
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 16,
    "sleep_level": 0,
    "kv_cache_memory_bytes": 1 << 26,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("apart")
    write_model(root / "model", {"head_dim": 32}, 0, tied=True)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "fragile.py").write_text(FRAGILE)
    return root


def samples(folder, name, **changes):
    """Of the two steps of a run, by request: tokens, log-probs, versions."""
    settings = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "data.prompts_per_step": 2,
        "rollout.backend": "vllm",
        "rollout.vllm": OPTIONS,
        "rollout.weights": "own",
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 24,
        "actor.optim.lr": 1e-3,
        "reward": [{"name": "exact_match", "workers": 1}],
        "tracking.rollouts_every_steps": 1,
        "tracking.trackers": [],
        "run.dir": str(folder / "runs"),
        "run.name": name,
        "run.steps": 2,
    }
    trainer = Trainer(load_config({**settings, **changes}, allow_code=True))
    trainer.train()
    trainer.close()
    files = sorted((trainer.folder.path / "rollouts").rglob("*.parquet"))
    rollouts = [rollout for file in files for rollout in read_rollouts(file)]
    return {
        r.request_id: (r.token_ids.tolist(), r.rollout_log_probs.tolist(), r.policy_versions.tolist())
        for r in rollouts
    }


@pytest.fixture(scope="module")
def inside(folder):
    """Samples of an engine in the trainer's process."""
    return samples(folder, "inside")


@pytest.mark.slow
def test_a_process_of_its_own_gives_the_samples_of_the_trainers_also_after_it_was_killed(
    folder, inside, caplog
):
    assert len(inside) == 16
    assert {version for *_, versions in inside.values() for version in versions} == {0, 1}
    fragile = {
        "rollout.backend": "fragile",
        "rollout.fragile": OPTIONS,
        "plugins": [str(folder / "fragile.py")],
    }
    assert samples(folder, "killed", **fragile, **{"rollout.process": {}}) == inside
    pids = [int(line) for line in Path(folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert "killed by SIGKILL" in caplog.text
    deadline = time.monotonic() + 20  # for those that were killed to be gone
    while left := [pid for pid in psutil.pids() if _lives_in(pid, pids)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_two_engines_sample_what_one_does(folder, inside):
    """Of the first step; rounding may depend on what else an engine samples, and an update grows such a difference."""
    found = samples(folder, "two", **{"rollout.process": {"engines": 2}})
    assert found.keys() == inside.keys()
    assert {version for *_, versions in found.values() for version in versions} == {0, 1}
    first = [id for id, (_, _, versions) in inside.items() if 1 not in versions]
    assert len(first) == 8
    for id in first:
        (tokens, log_probs, _), (expected, of_one, _) = found[id], inside[id]
        assert tokens == expected
        assert log_probs == pytest.approx(of_one, abs=1e-5)


def _lives_in(pid, groups):
    """Whether a process is of one of these, its keeper, or what it has started."""
    try:
        return os.getpgid(pid) in groups and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.mark.slow
def test_before_any_update_sampler_and_trainer_agree_over_the_whole_vocabulary(folder, capsys):
    """Cut by top-p, with no support told, in another process than the trainer's."""
    cut = {
        "rollout.temperature": 0.7,
        "rollout.top_p": 0.8,
        "rollout.max_log_prob_gap": 1e-4,
        "algorithm.correction.support": "off",
        "rollout.process": {},
        "run.steps": 1,
    }
    found = samples(folder, "parity", **cut)
    assert len(found) == 8
    (line,) = (folder / "runs" / "parity" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["mismatch/max_abs"] < 1e-4
