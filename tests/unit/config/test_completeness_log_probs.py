"""Who needs the sampler's log-probs of every step refuses a run that has those of some."""

import pytest

from engine_core.config.assemble import load_config
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError

PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Advantage, Loss, Stage

@hookimpl
def engine_advantages():
    needs = frozenset({"rewards", "rollout_log_probs"})
    return {"mine": Advantage(load=lambda batch: None, needs=needs)}

@hookimpl
def engine_losses():
    needs = frozenset({"advantages", "rollout_log_probs"})
    return {"own": Loss(load=lambda outputs, batch: None, needs=needs)}

@hookimpl
def engine_stages():
    return {"older": Stage(load=lambda rollouts, step: None, off_policy=True)}
"""
RUN = {
    "plugins": ["own.py"],
    "model.path": "model",
    "data.train": "train.jsonl",
    "reward": [{"name": "exact_match", "workers": 0}],
    "rollout.log_probs_every_steps": 4,
    "algorithm.correction.level": "off",
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return ``check(changes)``: it checks a run file with them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(PLUGIN)
    return lambda changes: check_complete(load_config(overrides=RUN | changes))


def test_a_run_that_only_measures_the_gap_may_skip_steps(check):
    check({})


@pytest.mark.parametrize(
    ("changes", "reader"),
    [
        ({"algorithm.advantage": "mine"}, r"algorithm\.advantage"),
        ({"algorithm.loss": "own"}, r"algorithm\.loss"),
        ({"stage": [{"name": "older"}]}, r"stage\.older"),
        ({"algorithm.correction.mask": "token"}, r"algorithm\.correction\.mask"),
        ({"rollout.top_p": 0.5}, r"rollout\.top_p"),
        ({"schedule": {"rollout.top_k": [[3, 5]]}}, r"rollout\.top_k"),
    ],
)
def test_one_that_reads_them_in_every_step_is_named(check, changes, reader):
    message = rf"log_probs_every_steps: got 4, expected 1: log-probs of every step are needed by {reader}\.$"
    with pytest.raises(ConfigError, match=message):
        check(changes)
