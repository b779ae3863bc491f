"""The memory of several roles on one device, with backends whose numbers are made up."""

from __future__ import annotations

import logging

import pytest

from engine_core.builtin import LocalOptions
from engine_core.config import EngineConfig
from engine_core.config.models import EnvironmentConfig
from engine_core.contracts.memory import MemoryNeed
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.specs import Options, TrainerSpec
from engine_plugin_tools import memory_plan
from engine_plugin_tools.bench.parts import _set_lengths
from engine_plugin_tools.memory_plan import CONTEXT, plan_device, planned
from engine_plugin_torch.options import TorchOptions
from engine_plugin_trainers.options import DistillOptions, DPOOptions, SFTOptions

UNIT = 1 << 30
ROLES = {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}


class Actor:
    """Weights 2, optimizer 4; activations 1 if they are recomputed, else all that is free, from 3 to 8."""

    @classmethod
    def memory_need(cls, config, model_config, question):
        if not question.trainable:
            return MemoryNeed({"weights": UNIT}, {}, {"activations": UNIT // 2})
        recomputed = config.options.activation_checkpointing is True
        free = 3 * UNIT if question.free is None else question.free - 6 * UNIT
        work = UNIT if recomputed else max(3 * UNIT, min(free, 8 * UNIT))
        return MemoryNeed(
            {"weights": 2 * UNIT}, {"optimizer": 4 * UNIT}, {"activations": work}, moving=UNIT, reserve=UNIT,
            least=UNIT if recomputed else 3 * UNIT,
            chosen={"max_tokens_per_rank": work, f"{config.backend}.activation_checkpointing": recomputed},
        )  # fmt: skip


class Sampler:
    """Weights 1, a cache of 2 to 6 as it is free, a workspace of 1."""

    @classmethod
    def memory_need(cls, config, model_config, question):
        room = 6 * UNIT if question.free is None else question.free - 2 * UNIT
        cache = max(2 * UNIT, min(room, 6 * UNIT))
        share = (cache + 2 * UNIT) / question.device_bytes
        return MemoryNeed(
            {"weights": UNIT}, {"cache": cache}, {"workspace": UNIT}, least=UNIT,
            chosen={f"{config.backend}.gpu_memory_utilization": share},
        )  # fmt: skip


class Sampling(Options):
    gpu_memory_utilization: float | str = "auto"
    max_model_len: int | None = 64


class Silent:
    """A backend without an estimate."""

    @classmethod
    def memory_need(cls, config, model_config, question):
        return None


class Plugins:
    """The plugins of the test."""

    def __init__(self, sampler=Sampler):
        self.engines = {"train_engines": Actor, "rollout_engines": sampler}

    def resolve(self, kind, name):
        return self.engines[kind]

    def spec(self, kind, name):
        return TrainerSpec(load="", concurrent=name == "async")


def config(offload=False, **actor):
    made = EngineConfig()
    made.actor.options = TorchOptions(**actor)
    made.rollout.options = Sampling()
    made.runtime.options = LocalOptions(offload_idle_roles=offload)
    return made


def units(size):
    return (size - CONTEXT) / UNIT


def plan(device, offload=False, sampler=Sampler, roles=ROLES, **actor):
    size = device * UNIT + CONTEXT
    return plan_device(config(offload, **actor), Plugins(sampler), roles, 1, size)


def test_phases_count_what_works_and_what_stays():
    found = {name: units(size) for name, size in plan(40).phases.items()}
    held = 2 + 4 + 1 + 1 + 6  # actor, its optimizer, reference, sampler, its cache
    assert found == {
        "generate": held + 1,
        "log_probs": held + 0.5,
        "train": held + 8,
        "sync": held + 1,
    }


def test_a_sampler_that_runs_ahead_works_in_every_phase():
    made = config()
    apart = {name: units(size) for name, size in plan(40).phases.items()}
    made.trainer = "async"
    found = plan_device(made, Plugins(), ROLES, 1, 40 * UNIT + CONTEXT).phases
    more = {"generate": 0, "log_probs": 1, "train": 1, "sync": 1}
    assert {name: units(size) - apart[name] for name, size in found.items()} == more


def lengths_of(made, roles, kind="train_engines"):
    """The longest sequences and the tokens of a mini-batch that a backend is asked about."""
    asked, plugins = set(), Plugins()

    class Asked(plugins.engines[kind]):
        @classmethod
        def memory_need(cls, config, model_config, question):
            asked.add((question.length, question.tokens))
            return super().memory_need(config, model_config, question)

    plugins.engines[kind] = Asked
    plan_device(made, plugins, roles, 1, 40 * UNIT)
    return asked


def test_the_length_of_an_episode_is_that_of_the_environment():
    made = config()
    for longest, expected in ((None, (None, None)), (3000, (3000, 64 * 8 * 3000))):
        made.environment = EnvironmentConfig(name="any", max_tokens=longest)
        assert lengths_of(made, ROLES) == {expected}


def test_rows_with_their_responses_are_as_long_as_their_table_says():
    made, actor = config(), {"actor": Role("train")}
    made.trainer, made.options = "sft", SFTOptions(max_tokens=30000)
    assert lengths_of(made, actor) == {(30000, 64 * 30000)}
    made.trainer, made.options = "dpo", DPOOptions(max_tokens=30000)
    assert lengths_of(made, actor) == {(30000, None)}
    sampled = made.data.max_prompt_tokens + made.rollout.max_response_tokens
    assert {length for length, _ in lengths_of(made, ROLES, "rollout_engines")} == {sampled}
    made.trainer, made.options = "distill", DistillOptions(max_tokens=30000)
    assert lengths_of(made, ROLES) == {(30000, 64 * 8 * 30000)}


@pytest.mark.parametrize(("trainer", "options"), [("rl", None), ("sft", SFTOptions())])
def test_a_benchmark_is_planned_as_a_run_with_its_sequences(trainer, options):
    made = config()
    made.trainer, made.options = trainer, options
    _set_lengths(made, sequences=6, prompt=100, length=70000)
    assert lengths_of(made, ROLES if trainer == "rl" else {"actor": Role("train")}) == {(70000, 6 * 70000)}


def test_idle_roles_that_sleep_leave_their_memory():
    found = {name: units(size) for name, size in plan(40, offload=True).phases.items()}
    assert found["generate"] == 2 + 1 + 1 + 6 + 1  # without the optimizer
    assert found["train"] == 2 + 4 + 1 + 1 + 8  # without the cache


def test_an_update_wakes_weights_that_sleep_with_the_cache():
    class Released(Sampler):
        @classmethod
        def memory_need(cls, config, model_config, question):
            return MemoryNeed({}, {"weights": UNIT, "cache": 2 * UNIT}, {"workspace": UNIT})

    found = {name: units(size) for name, size in plan(40, offload=True, sampler=Released).phases.items()}
    assert found["train"] == 2 + 4 + 1 + 8
    assert found["sync"] == 2 + 4 + 1 + 1 + 1  # the sampler's weights, and the actor's under way


def test_the_sampler_takes_what_the_favorite_micro_batch_leaves_and_the_trainer_the_rest():
    made = plan(18)  # others claim 2 + 4 + 1 + (3 + 1 of work): 7 are left, 2 of them no cache
    assert made.needs["rollout"].idle["cache"] == 5 * UNIT
    assert made.needs["actor"].working["activations"] == 18 * UNIT - (6 + 1 + 1 + 5) * UNIT
    assert plan(40).needs["rollout"].idle["cache"] == 6 * UNIT
    assert plan(9).needs["rollout"].idle["cache"] == 2 * UNIT


def test_a_plan_fits_with_its_reserve():
    assert plan(12 + 3 + 1, activation_checkpointing=True).fits
    exact = plan(2 + 4 + 1 + 1 + 2 + 3)
    assert exact.peak == exact.device_bytes
    assert not exact.fits  # nothing is left for the reserve
    assert not exact.hopeless
    assert not plan(2 + 4 + 1 + 1 + 3).hopeless  # with a sampler that has no cache
    assert plan(2 + 4 + 1 + 1 + 2).hopeless


def test_unknown_roles_are_said_to_be_unknown():
    made = plan(40, sampler=Silent)
    assert made.unknown == ["rollout"]
    assert ("rollout", "all", "unknown") in made.table()
    assert made.as_json()["roles"]["rollout"] == "unknown"


def test_a_run_gets_the_share_and_the_recomputation_of_the_plan_and_its_table_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="engine"):
        made = planned(config(), Plugins(), ROLES, 1, 40 * UNIT)
    assert made.rollout.options.gpu_memory_utilization == 8 / 40
    assert made.actor.options.activation_checkpointing is False  # "auto" in the run file
    assert made.actor.max_tokens_per_rank == "auto"  # chosen when the memory is known
    assert "peak" in caplog.text
    assert "chosen       rollout.hf.gpu_memory_utilization 0.2" in caplog.text


def test_a_plan_that_does_not_fit_is_warned_of_with_the_nearest_change(caplog):
    size = 2 + 4 + 1 + 1 + 2 + 2  # one short of the smallest micro-batch
    planned(config(activation_checkpointing=False), Plugins(), ROLES, 1, size * UNIT + CONTEXT)
    assert "phase 'train' needs 13.60 GiB and a reserve of 1.00 GiB" in caplog.text
    assert "It fits with actor.torch.activation_checkpointing = true." in caplog.text


def test_trained_roles_that_are_too_large_without_any_cache_are_refused():
    with pytest.raises(ConfigError, match="No change of this run file is known"):
        planned(config(), Plugins(), ROLES, 1, 4 * UNIT)


def test_a_sampler_whose_trainer_sleeps_gets_at_most_half_of_the_device():
    made = config()
    made.runtime.options = LocalOptions(offload_idle_roles=True)
    share = planned(made, Plugins(), ROLES, 1, 12 * UNIT).rollout.options.gpu_memory_utilization
    assert share == 0.5
    assert (
        plan_device(made, Plugins(), ROLES, 1, 12 * UNIT).chosen["rollout.hf.gpu_memory_utilization"] == 0.5
    )


def test_a_share_is_not_chosen_where_a_role_is_unknown_and_nothing_is_planned_for_an_export(caplog):
    made = config()
    silent = Plugins()
    silent.engines["train_engines"] = Silent
    assert planned(made, silent, ROLES, 1, 40 * UNIT) is made
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="engine"):
        assert planned(made, Plugins(), {"actor": Role("train", trainable=False)}, 1, UNIT) is made
    assert caplog.text == ""


def test_an_estimate_that_fails_ends_no_run(caplog):
    class Broken(Sampler):
        @classmethod
        def memory_need(cls, config, model_config, question):
            raise AttributeError("no heads")

    made = config()
    assert planned(made, Plugins(Broken), ROLES, 1, 40 * UNIT) is made
    assert "could not be planned" in caplog.text


def test_a_step_bounds_the_responses_at_a_time_unless_nothing_is_trained():
    asked = []

    class Asked(Sampler):
        @classmethod
        def memory_need(cls, config, model_config, question):
            asked.append(question.sequences)
            return super().memory_need(config, model_config, question)

    made = config()
    plan_device(made, Plugins(Asked), ROLES, 2, 40 * UNIT)
    assert set(asked) == {64 * 8 // 2}
    asked.clear()
    plan_device(made, Plugins(Asked), {"rollout": Role("rollout")}, 1, 40 * UNIT)
    assert set(asked) == {None}


def test_a_sampler_that_can_free_its_weights_is_a_change_alone_and_with_the_others():
    class Sleeping(Sampling):
        sleep_level: int = 1

    made = config()
    made.rollout.options = Sleeping()
    changed = {said: other.rollout.options.sleep_level for said, other in memory_plan.changes(made)}
    key = f"rollout.{made.rollout.backend}.sleep_level = 2"
    assert changed[key] == changed[f"runtime.local.offload_idle_roles = true and {key}"] == 2
    assert changed["runtime.local.offload_idle_roles = true"] == 1
    assert made.rollout.options.sleep_level == 1


def test_changes_that_keep_the_whole_model_come_before_an_adapter_and_grow_one_by_one():
    class Sharded(Sampling):
        gradient_sync: str = "last"
        activation_checkpointing: str = "none"

    made = config()
    made.actor.options = Sharded()
    texts = [said for said, _ in memory_plan.changes(made)]
    actor = f"actor.{made.actor.backend}"
    recomputed, each = f'{actor}.activation_checkpointing = "full"', f'{actor}.gradient_sync = "each"'
    assert texts.index(recomputed) < texts.index(f"{recomputed} and {each}")
    assert f"{recomputed} and {each} and runtime.local.offload_idle_roles = true" in texts
    adapter = texts.index("an adapter ([actor.lora])")
    assert all(said.startswith("an adapter") == (place >= adapter) for place, said in enumerate(texts))


def test_a_supervised_run_has_one_phase():
    made = config()
    made.trainer, made.options = "sft", SFTOptions()
    found = memory_plan.plan_device(made, Plugins(), {"actor": Role("train")}, 1, 40 * UNIT)
    assert list(found.phases) == ["train"]
