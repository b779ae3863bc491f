"""A train engine that only scores refuses everything else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_core.config import ModelConfig, RoleConfig
from engine_core.contracts.engines import Layout
from engine_core.local.engine_host import RankPlacement
from engine_plugin_processes.starting import describe
from engine_plugin_vllm_rollout.frozen_engine import FrozenEngine


class Scores(FrozenEngine):
    def infer(self, batch, outputs, adapter=True):
        return {}


def made(role="teacher", trainable=False, **settings):
    config = RoleConfig(backend="scores", **settings)
    return Scores(config, ModelConfig(), SimpleNamespace(role=role), trainable=trainable)


def test_it_scores_and_refuses_to_be_trained_saved_and_exported():
    engine = made()
    assert engine.infer(None, ()) == {}
    folder = Path("x")
    calls = [
        lambda: engine.forward_backward(None, None),
        engine.optimizer_step,
        engine.named_weights,
        lambda: engine.load_named_weights(()),
        lambda: engine.save(folder),
        lambda: engine.load(folder),
        lambda: engine.export(folder),
        engine._build_model_optimizer,
    ]
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"teacher\.backend = 'scores' scores a frozen model, which cannot"
        ):
            call()


def test_a_worker_of_many_describes_it_though_it_holds_no_module():
    told = describe(made(), RankPlacement(torch.device("cpu")))
    assert (told["attention"], told["layout"]) == (0.0, Layout())
