"""The engines of one rank of several: which sampler uses the actor's module, gathered for a phase."""

from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.contracts.engines import Layout, RolloutEngine, TrainEngine
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.local.engine_host import RankPlacement
from engine_plugin_processes.shared_module import SharedModuleHolder, SharingHost

ROLES = {"actor": Role("train"), "rollout": Role("rollout")}


class OnRanks(TrainEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        super().__init__(config, model_config, context, trainable=trainable)
        self.module = torch.nn.Linear(2, 2)

    @property
    def layout(self):
        return Layout(self.context.rank, self.context.world_size)


class OnlyTogether(OnRanks):
    lends_whole = False


class Sampler(RolloutEngine):
    trainer = None

    def share_module(self, engine):
        self.trainer = engine


for engine in (OnRanks, OnlyTogether, Sampler):
    engine.__abstractmethods__ = frozenset()


class Plugins:
    def __init__(self, trainer):
        self.trainer = trainer

    def resolve(self, kind, name):
        return self.trainer if kind == "train_engines" else Sampler

    def spec(self, kind, name):
        return SimpleNamespace(capabilities={"generation_module", "share_module"})


def built(trainer, world_size, weights="auto"):
    place = RankPlacement(torch.device("cpu"), rank=0, world_size=world_size)
    config = EngineConfig.model_validate({"rollout": {"weights": weights}})
    host = SharingHost(config, Plugins(trainer), {}, place)
    host.build(ROLES, 1)
    return host


def test_on_ranks_it_is_lent_the_module_where_that_fits_or_is_asked_for(monkeypatch, caplog):
    caplog.set_level("INFO", "engine")
    lent = built(OnRanks, 2)
    assert lent.shared
    assert isinstance(lent.engines["rollout"].trainer, SharedModuleHolder)
    assert lent.engines["rollout"].trainer.module is lent.engines["actor"].module
    assert "the sampler uses the actor's, gathered for the phase" in caplog.text
    monkeypatch.setattr("engine_plugin_processes.shared_module.free_bytes", lambda device: 20)
    assert built(OnRanks, 2).shared  # nothing of it is spread, so nothing is gathered
    monkeypatch.setattr("engine_plugin_processes.shared_module.gathered_bytes", lambda engine: 24)
    assert not built(OnRanks, 2).shared
    assert "the sampler has a separate copy" in caplog.text
    assert built(OnRanks, 2, weights="shared").shared
    assert not built(OnRanks, 2, weights="own").shared


def test_a_module_that_answers_only_where_all_ranks_call_it_is_not_lent():
    assert not built(OnlyTogether, 2).shared
    assert built(OnlyTogether, 1).shared
    with pytest.raises(ConfigError, match=r"rollout\.weights = 'shared': the actor's module on 2 ranks"):
        built(OnlyTogether, 2, weights="shared")


def test_in_a_pool_of_one_process_a_sampler_uses_the_actors_module_itself():
    alone = built(OnRanks, 1)
    assert alone.engines["rollout"].trainer is alone.engines["actor"]
