"""The engines of one process: who shares a module, and which backends may be on several ranks."""

from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.engines.base import Layout, RolloutEngine, TrainEngine
from engine_core.errors import ConfigError
from engine_core.runtime.base import Role
from engine_core.runtime.host import EngineHost, Place

ROLES = {"actor": Role("train"), "rollout": Role("rollout")}


class Alone(TrainEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        super().__init__(config, model_config, context, trainable=trainable)
        self.module = torch.nn.Linear(2, 2)


class OnRanks(Alone):
    @property
    def layout(self):
        return Layout(self.context.rank, self.context.world_size)


class Sampler(RolloutEngine):
    trainer = None

    def share_module(self, engine):
        self.trainer = engine


for engine in (Alone, OnRanks, Sampler):
    engine.__abstractmethods__ = frozenset()


class Plugins:
    def __init__(self, trainer):
        self.trainer = trainer

    def resolve(self, kind, name):
        return self.trainer if kind == "train_engines" else Sampler

    def spec(self, kind, name):
        return SimpleNamespace(capabilities={"generation_module", "share_module"})


def built(trainer, world_size):
    place = Place(torch.device("cpu"), rank=0, world_size=world_size)
    host = EngineHost(EngineConfig(), Plugins(trainer), {}, place)
    host.build(ROLES, 1)
    return host


def test_a_backend_that_knows_no_ranks_is_refused_on_several():
    with pytest.raises(
        ConfigError, match=r"actor\.backend = 'torch' trains in one process, and the pool of 'actor' has 2"
    ):
        built(Alone, 2)
    assert built(Alone, 1).engines["actor"].context.world_size == 1


def test_a_sampler_uses_the_actors_module_only_where_both_are_alone():
    alone, ranks = built(OnRanks, 1), built(OnRanks, 2)
    assert (alone.shared, ranks.shared) == (True, False)
    assert alone.engines["rollout"].trainer is alone.engines["actor"]
    assert ranks.engines["rollout"].trainer is None
    assert ranks.engines["rollout"].context.world_size == 2
