import contextlib
from types import SimpleNamespace

import pytest
import torch

from engine_core.builtin import LocalOptions
from engine_core.config import EngineConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import RolloutEngine, TrainEngine
from engine_core.contracts.runtime import Role
from engine_core.contracts.weight_sync import same_process
from engine_core.errors import ConfigError
from engine_core.local.engine_host import default_device
from engine_core.local.runtime import LocalRuntime

EVENTS = []


class Train(TrainEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        super().__init__(config, model_config, context, trainable=trainable)
        self.module = torch.nn.Linear(2, 2)
        EVENTS.append(f"build {context.role} trainable={trainable} of {context.total_steps}")

    def sleep(self, keep=()):
        EVENTS.append(f"sleep {self.context.role} keep={','.join(keep)}")

    def wake(self, only=None):
        EVENTS.append(f"wake {self.context.role}")

    def close(self):
        EVENTS.append(f"close {self.context.role}")

    def named_weights(self, to="all", adapter=False):
        yield from {"weight": torch.zeros(2, 3), "bias": torch.zeros(4, dtype=torch.bfloat16)}.items()


class Sample(RolloutEngine):
    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        EVENTS.append("build rollout")

    def share_module(self, engine):
        self.shared_with = engine

    def update_weights(self, stream, version):
        self.received = dict(stream)
        self.version = version
        return "sum"

    sleep, wake, close = Train.sleep, Train.wake, Train.close


class Broken(Sample):
    def __init__(self, config, model_config, context, **more):
        raise RuntimeError("no memory")


for engine in (Train, Sample, Broken):
    engine.__abstractmethods__ = frozenset()


class Plugins:
    """Answers what the runtime asks of a PluginSet."""

    def __init__(self, sampler=Sample, share=True):
        self.sampler, self.share = sampler, share

    def resolve(self, kind, name):
        return Train if kind == "train_engines" else self.sampler

    def spec(self, kind, name):
        offered = {
            "train_engines": {"generation_module"},
            "rollout_engines": {"share_module"} if self.share else set(),
        }
        return SimpleNamespace(capabilities=frozenset(offered[kind]))

    def step(self, role, *backends):
        return SimpleNamespace(engine_map_weights=lambda **_: None)


ROLES = {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}


@pytest.fixture(autouse=True)
def _no_events():
    EVENTS.clear()


def started(plugins, **options):
    config = EngineConfig()
    config.runtime.options = LocalOptions(**options)
    runtime = LocalRuntime(config, plugins, {"tokenizer": "t"})
    return runtime, runtime.start(ROLES, total_steps=7)


def test_each_role_has_an_engine_and_only_trained_ones_an_optimizer():
    _, groups = started(Plugins())
    assert set(groups) == set(ROLES)
    assert EVENTS == ["build actor trainable=True of 7", "build ref trainable=False of 7", "build rollout"]


class Apart(Plugins):
    """Plugins with the part that runs samplers in separate processes."""

    def spec(self, kind, name):
        return SimpleNamespace(concurrent=False) if kind == "trainers" else super().spec(kind, name)

    def require(self, kind, name):
        return self

    def make(self, config, model_config, context, source):
        EVENTS.append("start the process")
        return SimpleNamespace(
            build=lambda planned: Sample(planned, model_config, context),
            close=lambda: EVENTS.append("end the process"),
        )


@pytest.mark.parametrize("broken", [False, True])
def test_a_sampler_in_a_process_starts_before_the_actor_is_built_and_ends_if_it_cannot_be(
    broken, monkeypatch
):
    if broken:
        monkeypatch.setattr(Train, "__init__", Broken.__init__)
    config = EngineConfig()
    config.runtime.options, config.rollout.process = LocalOptions(), ProcessConfig()
    runtime = LocalRuntime(config, Apart(), {"tokenizer": "t"})
    with pytest.raises(RuntimeError, match="no memory") if broken else contextlib.nullcontext():
        runtime.start(ROLES, total_steps=7)
    assert EVENTS[0] == "start the process"
    if broken:
        assert EVENTS[1:] == ["end the process"]
    else:
        assert EVENTS[1:] == [
            "build actor trainable=True of 7",
            "build ref trainable=False of 7",
            "build rollout",
        ]


def test_what_a_role_cannot_do_here_is_refused_before_any_is_built(monkeypatch):
    def check(config, context, *, trainable=True):
        EVENTS.append(f"check {context.role} trainable={trainable}")
        if context.role == "ref":
            raise ConfigError("ref.torch.param_dtype: ...")

    monkeypatch.setattr(Train, "check", staticmethod(check))
    with pytest.raises(ConfigError, match=r"^ref\.torch\.param_dtype"):
        started(Plugins())
    assert EVENTS == ["check actor trainable=True", "check ref trainable=False"]


def test_only_a_training_run_has_roles_whose_weights_never_change():
    _, groups = started(Plugins())
    assert {name: group.engine.context.frozen for name, group in groups.items()} == {
        "actor": False,
        "ref": True,
        "rollout": False,
    }
    runtime = LocalRuntime(EngineConfig(), Plugins(), {})
    roles = {"actor": Role("train", trainable=False)}
    assert not runtime.start(roles, total_steps=0)["actor"].engine.context.frozen  # it may be exported
    roles = {"actor": Role("train"), "ref": Role("train", trainable=False, refreshed=True)}
    context = runtime.start(roles, total_steps=7)["ref"].engine.context
    assert (context.frozen, context.mixed) == (False, False)


def test_a_reference_into_which_shares_are_mixed_is_told_so():
    roles = {"ref": Role("train", trainable=False, refreshed=True, mixed=True)}
    engine = LocalRuntime(EngineConfig(), Plugins(), {}).start(roles, total_steps=7)["ref"].engine
    assert engine.context.mixed


def test_a_critic_is_built_from_its_own_table_and_sleeps_and_wakes_with_the_trainers():
    config = EngineConfig(critic={"max_tokens_per_rank": 5})
    config.runtime.options = LocalOptions(offload_idle_roles=True)
    runtime = LocalRuntime(config, Plugins(), {})
    roles = {"actor": Role("train", idle_steps=4), "critic": Role("train"), "rollout": Role("rollout")}
    groups = runtime.start(roles, total_steps=7)
    assert EVENTS == ["build actor trainable=True of 3", "build critic trainable=True of 7", "build rollout"]
    assert groups["critic"].engine.config is config.critic
    EVENTS.clear()
    with runtime.phase("generate"), runtime.phase("train"):
        pass
    assert [event for event in EVENTS if "critic" in event] == ["sleep critic keep=weights", "wake critic"]


def test_a_sampler_that_can_uses_the_actors_module_and_nothing_moves():
    runtime, groups = started(Plugins())
    assert groups["rollout"].engine.shared_with is groups["actor"].engine
    result = runtime.push_weights("actor", "rollout", 3)
    assert (result.bytes, result.version, groups["rollout"].engine.version) == (0, 3, 3)


def test_another_sampler_receives_the_weights():
    runtime, groups = started(Plugins(share=False))
    result = runtime.push_weights("actor", "rollout", 1)
    assert result.bytes == 2 * 3 * 4 + 4 * 2
    assert result.checksum == "sum"
    assert set(groups["rollout"].engine.received) == {"weight", "bias"}


def test_calls_are_carried_out_at_once_and_return_futures():
    _, groups = started(Plugins())
    assert groups["actor"].call("wake").result() is None
    assert EVENTS[-1] == "wake actor"


def test_memory_is_traded_only_when_asked_and_given_back_before_it_is_taken():
    runtime, _ = started(Plugins())
    EVENTS.clear()
    with runtime.phase("generate"):
        pass
    assert EVENTS == []
    runtime, _ = started(Plugins(), offload_idle_roles=True)
    EVENTS.clear()
    with runtime.phase("generate"):
        pass
    assert EVENTS == ["sleep actor keep=weights", "sleep ref keep=weights", "wake rollout"]
    EVENTS.clear()
    with runtime.phase("train"):
        pass
    assert EVENTS == ["sleep rollout keep=weights", "wake actor", "wake ref"]


def test_the_time_of_handing_memory_over_is_summed_up(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 22.0])
    runtime, _ = started(Plugins(), offload_idle_roles=True)
    runtime.traded_seconds = 1.0
    monkeypatch.setattr("engine_core.local.runtime.time.perf_counter", lambda: next(clock))
    with runtime.phase("generate"):
        pass
    with runtime.phase("train"):
        pass
    assert runtime.traded_seconds == 1.0 + 0.5 + 2.0


def test_when_one_engine_cannot_be_built_those_before_it_are_closed():
    with pytest.raises(RuntimeError, match="no memory"):
        started(Plugins(sampler=Broken))
    assert EVENTS[-2:] == ["close ref", "close actor"]


def test_a_stream_that_breaks_leaves_the_sampler_at_its_old_version():
    def broken(to):
        yield "weight", torch.zeros(1)
        raise OSError("lost")

    sampler = Sample(None, None, SimpleNamespace(role="rollout"))
    actor = SimpleNamespace(named_weights=broken)
    with pytest.raises(OSError, match="lost"):
        same_process(actor, sampler, 5, shared=False)
    assert sampler.version == 0


def test_a_torch_built_for_an_accelerator_that_is_not_there_runs_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert default_device() == torch.device("cuda")
