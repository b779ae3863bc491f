"""Checkpoints that do not fit the engine that loads them."""

from __future__ import annotations

import json

import pytest
import torch

from engine_core.errors import DataError
from engine_core.types import LossCall


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_that_comes_or_goes_between_two_attempts_is_refused(make_engine, batch, tmp_path, first):
    def built(scheduled):
        def engine_build_optimizer(module, optim_config):
            optimizer = torch.optim.SGD(module.parameters(), lr=optim_config.lr)
            return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer) if scheduled else None

        return make_engine("llama", hooks={"engine_build_optimizer": engine_build_optimizer})

    engine = built(first)
    engine.forward_backward(batch, LossCall("nll"))
    engine.optimizer_step()
    engine.save(tmp_path / "saved").result()
    built(first).load(tmp_path / "saved")
    had, has = ("a", "no") if first else ("no", "a")
    with pytest.raises(
        DataError,
        match=rf"saved was written with {had} learning-rate schedule, and the optimizer of the role 'actor' now has {has} "
        r"learning-rate schedule\. Bring the plugin back .*engine_build_optimizer",
    ):
        built(not first).load(tmp_path / "saved")
    make_engine("llama", trainable=False).load(tmp_path / "saved")  # an evaluation needs neither


def test_a_state_of_another_form_is_refused_with_its_file(make_engine, tmp_path):
    engine = make_engine("llama")
    engine.save(tmp_path / "saved").result()
    file = tmp_path / "saved" / "state.json"
    state = json.loads(file.read_text())
    for key, value in {
        "optimizer": {"groups": 3},
        "num_skipped_steps": None,
        "random": {"cpu": "AAAA"},
    }.items():
        file.write_text(json.dumps({**state, key: value}))
        with pytest.raises(DataError, match=r"saved/state\.json does not hold what this version reads"):
            engine.load(tmp_path / "saved")
    file.write_text("[1]")
    with pytest.raises(
        DataError, match=r"saved/state\.json is no state of a train engine: it holds no table"
    ):
        engine.load(tmp_path / "saved")
