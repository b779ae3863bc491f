"""The states of a sampler's memory. A stand-in records the calls, since vLLM has no sleep on a CPU; what they do on a GPU
is measured by benchmarks/vllm/speed.py, which also compares what is sampled before and after."""

import pytest

from engine_core.errors import DataError
from engine_plugin_vllm_rollout.memory import Memory


class Recorder:
    """vLLM's engine of 0.25.1, as far as its memory goes: whoever sleeps twice or wakes what is awake is refused."""

    def __init__(self):
        self.calls, self.freed = [], set()

    def sleep(self, level, mode):
        assert not self.freed, "vLLM ignores a second sleep"
        self.calls.append(f"sleep {level}")
        self.freed = {"weights", "kv_cache"}

    def wake_up(self, tags):
        assert set(tags) <= self.freed, "vLLM ignores what is awake"
        self.calls.append(f"wake {' '.join(tags)}")
        self.freed -= set(tags)


class Newer(Recorder):
    """0.32: the KV cache alone can be given back."""

    def sleep(self, level, mode):
        if level:
            super().sleep(level, mode)

    def release_kv_cache_memory(self):
        assert not self.freed
        self.calls.append("release")
        self.freed = {"kv_cache"}


def test_level_0_frees_nothing_and_is_asleep_in_name():
    engine = Recorder()
    memory = Memory(engine, 0)
    memory.sleep()
    with pytest.raises(RuntimeError, match="asleep: its weights cannot be updated"):
        memory.before_update()
    memory.wake()
    memory.before_update()
    assert engine.calls == []


def test_level_1_keeps_the_weights_on_the_device_where_they_are_kept():
    engine = Recorder()
    memory = Memory(engine, 1)
    memory.sleep(keep=("weights",))
    memory.before_update()
    memory.after_update()
    with pytest.raises(RuntimeError, match=r"asleep; call wake\(\) first"):
        memory.before_sampling()
    memory.wake()
    memory.before_sampling()
    assert engine.calls == ["sleep 1", "wake weights", "wake kv_cache"]


def test_a_release_that_can_gives_back_the_cache_alone():
    engine = Newer()
    memory = Memory(engine, 1)
    memory.sleep(keep=("weights",))
    memory.wake()
    assert engine.calls == ["release", "wake kv_cache"]


def test_level_2_takes_the_weights_back_with_the_update_and_the_cache_after_it():
    engine = Recorder()
    memory = Memory(engine, 2)
    memory.sleep(keep=("weights",))
    memory.before_update()
    memory.after_update()
    memory.wake()
    memory.before_sampling()
    assert engine.calls == ["sleep 2", "wake weights", "wake kv_cache"]


def test_level_2_samples_nothing_before_new_weights_came():
    memory = Memory(Recorder(), 2)
    memory.sleep()
    memory.wake()
    with pytest.raises(DataError, match=r"gave its weights up \(rollout\.vllm\.sleep_level = 2\)"):
        memory.before_sampling()
    memory.before_update()
    memory.after_update()
    memory.before_sampling()


def test_from_half_asleep_to_asleep_goes_through_awake():
    engine = Recorder()
    memory = Memory(engine, 1)
    memory.sleep(keep=("weights",))
    memory.sleep()
    memory.wake(["weights"])
    memory.wake()
    assert engine.calls == [
        "sleep 1",
        "wake weights",
        "wake kv_cache",
        "sleep 1",
        "wake weights",
        "wake kv_cache",
    ]


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match=r"Unknown part 'cache' of a sampler\. Did you mean 'kv_cache'\?"):
        Memory(Recorder(), 1).sleep(keep=("cache",))
