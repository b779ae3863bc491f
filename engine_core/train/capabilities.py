"""Checks of optional engine capabilities that a run needs: replayed support, LoRA adapters, responses stopped early."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine_core.config.schedule import boundaries, config_at
from engine_core.errors import ConfigError
from engine_core.tables import CUTTING

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet

log = logging.getLogger("engine")


def replays_support(config: EngineConfig, plugins: PluginSet, trained: Iterable[str], samples: bool) -> bool:
    """Return whether the run replays the support of cut distributions (`algorithm.correction.support`).

    Logs a warning if ``auto`` comes to False although sampling options cut the distribution.

    Args:
        config: of the run.
        plugins: of the run.
        trained: roles whose engine computes log-probs.
        samples: whether the run samples; stored rollouts have no sampler.

    Raises:
        ConfigError: ``replay`` is set, and an engine of the run lacks the capability.
    """
    wanted = config.algorithm.correction.support
    if wanted == "off":
        return False
    engines = [("rollout", "rollout_engines", config.rollout.backend)] if samples else []
    engines += [(name, "train_engines", config.role(name).backend) for name in trained]
    lacking = [
        f"{role}.backend = '{backend}'"
        for role, kind, backend in engines
        if not has_capability(plugins, kind, backend, "support")
    ]
    if not lacking:
        return True
    why = f"{lacking[0]} has no capability 'support'"
    if wanted == "replay":
        raise ConfigError(
            f"algorithm.correction.support: got 'replay', but {why}. Use another backend, or 'off': log-probs are then "
            "over the whole vocabulary."
        )
    if keys := cutting_keys(config):
        log.warning(
            "%s cut the distribution, and %s: log-probs of sampler and trainer are compared over the whole "
            "vocabulary, and the importance weights are those of another policy than the one that sampled. Remove "
            'the former, or set algorithm.correction.support = "off" to say that this is meant.',
            keys, why,
        )  # fmt: skip
    return False


def has_capability(plugins: PluginSet, kind: str, backend: str, capability: str) -> bool:
    """Return whether an engine declares a capability; ``kind``: ``train_engines`` or ``rollout_engines``."""
    spec: Any = plugins.spec(kind, backend)
    return capability in spec.capabilities


def cutting_keys(config: EngineConfig) -> str:
    """Return the keys that cut the distribution in some step, as text; "" if none does."""
    cutting = {name for step in boundaries(config) for name in config_at(config, step).rollout.cutting}
    return " and ".join(f"rollout.{name}" for name in CUTTING if name in cutting)


def check_other_policy(config: EngineConfig) -> None:
    """Refuse to learn without importance weights from a sampler whose options make it another policy.

    Raises:
        ConfigError: `algorithm.correction.level` is ``off`` and ``bypass`` is not set.
    """
    correction = config.algorithm.correction
    keys = getattr(config.rollout.options, "other_policy", "")
    if keys and correction.level == "off" and not correction.bypass:
        raise ConfigError(
            f"algorithm.correction.level: got 'off', but with {keys} the sampler is another policy than the one that learns: "
            "its tokens must be weighed. Leave the key out ('auto' is then 'token'), or remove the other."
        )


def check_adapter(config: EngineConfig) -> None:
    """Refuse to send the sampler only an adapter where the run has none, or the sampler's base does not fit it.

    Raises:
        ConfigError: no [actor.lora]; DoRA or `modules_to_save`; the actor's base is another model.
    """
    lora = config.actor.lora
    if not getattr(config.rollout.options, "adapter", False):
        return
    key = f"rollout.{config.rollout.backend}.adapter"
    if lora is None:
        raise ConfigError(
            f"{key}: got true, but the run trains no adapter. Remove the key, or add a table [actor.lora]."
        )
    if lora.dora or lora.modules_to_save:
        what = "actor.lora.dora" if lora.dora else "actor.lora.modules_to_save"
        raise ConfigError(
            f"{key}: got true, but {what} trains more than the products that a sampler can add to its base. Remove one of "
            "the two: without the former merged weights are handed over."
        )
    if config.actor.path and config.actor.path != config.model.path:
        raise ConfigError(
            f"{key}: got true, but the adapter is of actor.path = '{config.actor.path}' and the sampler's base is model.path = "
            f"'{config.model.path}'. Name one model, or remove the key."
        )


def check_partial(config: EngineConfig, plugins: PluginSet) -> None:
    """Refuse options that stop responses early if the sampler cannot stop them.

    Raises:
        ConfigError: the sampler's backend lacks the capability ``partial``.
    """
    rollout = config.rollout
    if rollout.stops_responses and not has_capability(plugins, "rollout_engines", rollout.backend, "partial"):
        key = "request_timeout_seconds" if rollout.request_timeout_seconds else "over_sampling"
        value = rollout.request_timeout_seconds or rollout.over_sampling
        raise ConfigError(
            f"rollout.{key}: got {value:g}, but rollout.backend = '{rollout.backend}' has no capability 'partial': it "
            "cannot stop a response in its midst. Remove the key, or use another backend."
        )
