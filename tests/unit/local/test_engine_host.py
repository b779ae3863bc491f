"""The engines of one process: which sampler uses the actor's module, and which backends may be on several ranks."""

from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.contracts.engines import Layout, RolloutEngine, TrainEngine
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.local import engine_host
from engine_core.local.engine_host import EngineHost, RankPlacement, naming_table

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


def built(trainer, world_size, weights="auto", sharing=True):
    place = RankPlacement(torch.device("cpu"), rank=0, world_size=world_size)
    plugins = Plugins(trainer)
    if not sharing:
        plugins.spec = lambda kind, name: SimpleNamespace(capabilities=set())
    config = EngineConfig.model_validate({"rollout": {"weights": weights}})
    host = EngineHost(config, plugins, {}, place)
    host.build(ROLES, 1)
    return host


def test_engines_built_before_one_that_fails_are_closed(monkeypatch):
    closed = []

    def fails(self, config, model_config, context):
        raise ConfigError("no such sampler")

    monkeypatch.setattr(OnRanks, "close", lambda self: closed.append(self.context.role))
    monkeypatch.setattr(Sampler, "__init__", fails)
    with pytest.raises(ConfigError, match="no such sampler"):
        built(OnRanks, 1)
    assert closed == ["actor"]


def test_a_backend_that_knows_no_ranks_is_refused_on_several():
    with pytest.raises(
        ConfigError, match=r"actor\.backend = 'torch' trains in one process, and the pool of 'actor' has 2"
    ):
        built(Alone, 2)
    assert built(Alone, 1).engines["actor"].context.world_size == 1


def test_alone_a_sampler_uses_the_actors_module_unless_it_is_told_not_to_or_cannot():
    alone = built(OnRanks, 1)
    assert alone.shared
    assert alone.engines["rollout"].trainer is alone.engines["actor"]
    for host in (built(OnRanks, 1, weights="own"), built(OnRanks, 1, sharing=False)):
        assert not host.shared
        assert host.engines["rollout"].trainer is None


class Planning(Plugins):
    """Plugins with the part ``memory_plan``."""

    built = False  # whether a plugin builds the model

    def __init__(self, trainer, plan):
        super().__init__(trainer)
        self.plan = plan

    def resolve(self, kind, name):
        return self.plan if (kind, name) == ("parts", "memory_plan") else super().resolve(kind, name)

    def offered(self, kind, name):
        return (kind, name) == ("parts", "memory_plan")

    def overrides(self, hook):
        return self.built


@pytest.fixture
def host_of(monkeypatch):
    def make(plan, live=None, memory=1000, others=False, **facts):
        monkeypatch.setattr(engine_host, "device_bytes", lambda device: memory)
        monkeypatch.setattr(engine_host, "has_others", lambda device: others)
        plugins = Planning(OnRanks, plan)
        vars(plugins).update(facts)
        return EngineHost(EngineConfig(), plugins, live or {}, RankPlacement(torch.device("cpu")))

    return make


def test_the_memory_of_an_accelerator_is_planned_before_a_model_is_built(host_of):
    def plan(config, plugins, roles, ranks, device_bytes):
        assert (roles, ranks, device_bytes) == (ROLES, 1, 1000)
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 3})})

    host = host_of(plan)
    host.build(ROLES, 1)
    assert host.engines["rollout"].config.group_size == 3


def test_a_run_that_does_not_fit_is_refused_before_a_model_is_built(host_of):
    def plan(*facts):
        raise ConfigError("does not suffice")

    host = host_of(plan)
    with pytest.raises(ConfigError, match="does not suffice"):
        host.build(ROLES, 1)
    assert host.engines == {}


def test_nothing_is_planned_without_an_accelerator_of_its_own_or_for_a_model_of_a_plugin_or_from_python(
    host_of,
):
    def plan(*facts):
        raise AssertionError("planned")

    for facts in ({"memory": None}, {"others": True}, {"built": True}, {"live": {"model": 1}}):
        host_of(plan, **facts).build(ROLES, 1)


@pytest.mark.parametrize(
    ("name", "engine_role", "said", "expected"),
    [
        (
            "reward_model",
            "",
            "reward_model.fsdp.tp and [reward_model.lora]",
            "actor.fsdp.tp and [actor.lora]",
        ),
        ("reward.rm", "reward_model", "reward_model.torch.device", "reward.model.torch.device"),
        ("ref", "", "ref.torch.device", "ref.torch.device"),
    ],
)
def test_an_error_names_the_table_that_a_role_is_built_from(name, engine_role, said, expected):
    config = EngineConfig(reward=[{"name": "rm", "model": {"path": "scorer"}}])
    with (
        pytest.raises(ConfigError) as failure,
        naming_table(config, name, Role("train", engine_role=engine_role)),
    ):
        raise ConfigError(said)
    assert str(failure.value) == expected
