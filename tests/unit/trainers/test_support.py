"""What a run asks of its engines, refused before any is built."""

from types import SimpleNamespace

import pytest

from engine_core.errors import ConfigError
from engine_core.trainers.support import check_other_policy


def run(level="auto", bypass=False, keys="rollout.x.bits = 8", samples=True):
    correction = SimpleNamespace(level=level, bypass=bypass)
    options = SimpleNamespace(other_policy=keys) if keys is not None else None
    config = SimpleNamespace(
        rollout=SimpleNamespace(options=options), algorithm=SimpleNamespace(correction=correction)
    )
    return SimpleNamespace(config=config, samples=samples)


def test_a_sampler_that_is_another_policy_by_its_options_is_never_learned_from_unweighed():
    with pytest.raises(
        ConfigError, match=r"algorithm\.correction\.level: got 'off', but with rollout\.x\.bits = 8 "
    ):
        check_other_policy(run("off"))
    for fine in (run(), run("token"), run("off", bypass=True), run("off", keys=""), run("off", keys=None)):
        check_other_policy(fine)
    check_other_policy(run("off", samples=False))
