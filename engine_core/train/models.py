"""Facts about the models of a run: the longest sequence, whether the teacher fits, which model is the reference.

The reference model of an actor with a LoRA adapter is the actor itself without the adapter: no second model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.data import load_tokenizer, tokens_differ
from engine_core.errors import ConfigError
from engine_core.model_config import has_no_weights, load_hf_config

if TYPE_CHECKING:
    from engine_core.config import EngineConfig, ModelConfig
    from engine_core.contracts.parts import RewardModels
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch

log = logging.getLogger("engine")


def text_config(model: ModelConfig, plugins: PluginSet, live: Any = None) -> Any:
    """Return the transformers config of the text model; None for a model that a plugin builds.

    Args:
        model: ``[model]``.
        plugins: of the run.
        live: a module given from Python, in place of the folder.
    """
    if live is not None:
        hf_config = getattr(live, "config", None)
    elif plugins.overrides("engine_build_model"):
        return None
    else:
        hf_config = load_hf_config(model)
    get = getattr(hf_config, "get_text_config", None)
    return get() if get is not None else None


def held_tokens(text: Any, sampler: Any) -> int:
    """Return the maximum tokens of prompt plus response that the model and the sampler support.

    Args:
        text: result of ``text_config``.
        sampler: options of the rollout engine, which may have `max_model_len`.
    """
    return min(model_length(text), getattr(sampler, "max_model_len", None) or 1 << 30)


def model_length(text: Any) -> int:
    """Return the maximum sequence length in tokens from the ``text_config``; 2**30 if it does not have it."""
    return getattr(text, "max_position_embeddings", None) or 1 << 30


def check_teacher(config: EngineConfig, plugins: PluginSet, tokenizer: Any) -> None:
    """Refuse a teacher that has another tokenizer than the student.

    Raises:
        ConfigError: the tokenizers differ, or the teacher's backend gives no log-probs at the run's temperature.
        DataError: no tokenizer loads from the teacher's folder.
    """
    _check_temperature(config, plugins)
    model = teacher_model(config)
    theirs = load_tokenizer(model, table="teacher")
    if why := tokens_differ(tokenizer, theirs):
        raise ConfigError(
            f"teacher.path: '{model.path}' has another tokenizer than the student: {why}. The teacher is "
            "asked about the student's tokens: take one of the student's family."
        )
    if theirs.chat_template != tokenizer.chat_template:
        log.info("The teacher has another chat template; it is shown the student's.")


def _check_temperature(config: EngineConfig, plugins: PluginSet) -> None:
    """Refuse a temperature other than 1 for a backend that only scores, since it gives log-probs at temperature 1."""
    backend = config.role("teacher").backend
    own: float | None = getattr(config.options, "temperature", None)
    key = "rollout.temperature" if own is None else f"{config.trainer}.temperature"
    temperature = config.rollout.temperature if own is None else own
    spec: Any = plugins.spec("train_engines", backend)
    if spec.frozen_only and temperature != 1.0:
        raise ConfigError(
            f"{key}: teacher.backend = '{backend}' tells log-probs at temperature 1, and this is {temperature:g}. Set it to "
            "1, or take another train engine for the teacher."
        )


def teacher_model(config: EngineConfig) -> ModelConfig:
    """Return the ``[model]`` table of the teacher, which a run needs that learns from one."""
    return config.model_of("teacher").model_copy(update={"tokenizer": None})


class WithoutAdapter(WorkerGroup):
    """A view of a role's workers that computes with the base model, without the adapter.

    Args:
        group: the workers of the role that has the adapter.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Call ``infer`` without the adapter.

        Raises:
            RuntimeError: ``method`` is another one.
        """
        if method != "infer":
            raise RuntimeError(f"The reference is the actor without its adapter: it can infer, not {method}.")
        return self.group.call(method, batch, split, adapter=False, **plain)


def reward_roles(config: EngineConfig, plugins: PluginSet) -> dict[str, Role]:
    """Return the models of the rewards as roles of the run."""
    if not any(reward.has_model for reward in config.reward):
        return {}
    part: RewardModels = plugins.require("parts", "reward_models")
    return part.roles(config)


def loaded(groups: Mapping[str, WorkerGroup], role: str) -> WorkerGroup:
    """Return the workers of a role.

    Raises:
        ConfigError: it has none here.
    """
    if role not in groups:
        raise ConfigError(
            f"The role '{role}' is not loaded here, only {', '.join(groups)}. From a checkpoint: engine export --role {role}."
        )
    return groups[role]


def export_options(config: EngineConfig, role: str, adapter: bool) -> dict[str, Any]:
    """Return the further arguments of an engine's ``export``.

    Raises:
        ConfigError: an adapter is wanted of a role that trains its whole model.
    """
    if adapter and config.role(role).lora is None:
        raise ConfigError(
            f"The run trained the whole model: it has no [{role}.lora], so there is no adapter."
        )
    return {"adapter": True} if adapter else {}  # an engine without adapters need not know the argument


def start_groups(
    runtime: Runtime, config: EngineConfig, roles: Mapping[str, Role], total_steps: int
) -> dict[str, WorkerGroup]:
    """Start the workers of these roles; a reference that is the actor's base shares the actor's workers.

    Raises:
        ConfigError: such a reference should follow the actor (`ref_refresh_steps`), which is impossible.
    """
    if "ref" not in roles or not config.ref_is_base:
        return runtime.start(roles, total_steps)
    if roles["ref"].refreshed:
        raise ConfigError(
            "The reference is the actor without its adapter ([actor.lora]), and the weights below an adapter never "
            "change, so it cannot follow the actor. Give it a separate model: [ref] path."
        )
    groups = runtime.start({name: role for name, role in roles.items() if name != "ref"}, total_steps)
    log.info("The reference is the actor without its adapter: no second model is built.")
    return {**groups, "ref": WithoutAdapter(groups["actor"])}


def warn_of_random_weights(config: EngineConfig, plugins: PluginSet, roles: Mapping[str, Role]) -> None:
    """Log a warning for each role whose model folder holds a config and no weights; a sampler counts if it is alone.

    Raises:
        ConfigError: a role's only weights are a pickle.
    """
    for name in [name for name, role in roles.items() if role.kind == "train"] or roles:
        path = config.model_of(name).path
        spec: Any = plugins.spec("train_engines", config.role(name).backend)
        if path and not (spec.remote or spec.own_model) and has_no_weights(path):
            log.warning("%s holds a config and no weights: random weights from model.seed.", path)
