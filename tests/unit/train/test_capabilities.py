"""What a run asks of its engines, refused before any is built."""

import contextlib
from types import SimpleNamespace

import pytest

from engine_core.config.roles import LoRAConfig
from engine_core.errors import ConfigError
from engine_core.train.capabilities import check_adapter, check_other_policy


def run(level="auto", bypass=False, keys="rollout.x.bits = 8"):
    correction = SimpleNamespace(level=level, bypass=bypass)
    options = SimpleNamespace(other_policy=keys) if keys is not None else None
    return SimpleNamespace(
        rollout=SimpleNamespace(options=options), algorithm=SimpleNamespace(correction=correction)
    )


def test_a_sampler_that_is_another_policy_by_its_options_is_never_learned_from_unweighed():
    with pytest.raises(
        ConfigError, match=r"algorithm\.correction\.level: got 'off', but with rollout\.x\.bits = 8 "
    ):
        check_other_policy(run("off"))
    for fine in (run(), run("token"), run("off", bypass=True), run("off", keys=""), run("off", keys=None)):
        check_other_policy(fine)


@pytest.mark.parametrize(
    ("lora", "path", "message"),
    [
        (None, None, r"rollout\.x\.adapter: got true, but the run trains no adapter"),
        ({"dora": True}, None, r"actor\.lora\.dora trains more than the products"),
        ({"modules_to_save": ["lm_head"]}, None, r"actor\.lora\.modules_to_save trains more than"),
        ({}, "other", r"actor\.path = 'other' and the sampler's base is model\.path = 'base'"),
        ({}, "base", ""),
    ],
)
def test_an_adapter_alone_needs_one_that_the_samplers_base_can_carry(lora, path, message):
    table = None if lora is None else LoRAConfig(**lora)
    config = SimpleNamespace(
        actor=SimpleNamespace(lora=table, path=path),
        model=SimpleNamespace(path="base"),
        rollout=SimpleNamespace(backend="x", options=SimpleNamespace(adapter=True)),
    )
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_adapter(config)
