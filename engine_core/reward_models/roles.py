"""Which roles the rewards of a run need, and what asks them for values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from engine_core.data import tokenizer_hash
from engine_core.errors import DataError
from engine_core.reward_models.classifier import ClassifierReward
from engine_core.reward_models.folders import check_classifier, longest, open_folder
from engine_core.reward_models.sequences import Sequences
from engine_core.runtime.base import Role, WorkerGroup

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.rewards import RewardConfig
    from engine_core.plugins import PluginSet
    from engine_core.rewards import ModelReward

PHASE = "reward"
"""The phase of a step in which these roles have device memory."""

GroupOf = Callable[[str], WorkerGroup]


def reward_roles(config: EngineConfig) -> dict[str, Role]:
    """The models of the rewards, by role: ``reward.NAME``."""
    return {
        reward.role: Role("train", trainable=False, told="reward_model", phase=PHASE)
        for reward in config.reward
        if reward.has_model
    }


def model_rewards(
    config: EngineConfig,
    plugins: PluginSet,
    group_of: GroupOf,
    tokenizer: Any = None,
    columns: Collection[str] = (),
) -> dict[str, ModelReward]:
    """What asks the models of the rewards, by reward; everything that can be refused is refused here.

    Args:
        config: of the run.
        plugins: of the run; where one builds models of its own, their folders are not judged.
        group_of: the workers of a role, which need exist only when a value is wanted.
        tokenizer: the actor's; None: there are no sampled tokens, only texts.
        columns: of the data.
    """
    return {
        reward.name: _classifier(config, reward, plugins, group_of, tokenizer, columns)
        for reward in config.reward
        if reward.has_model
    }


def _classifier(
    config: EngineConfig,
    reward: RewardConfig,
    plugins: PluginSet,
    group_of: GroupOf,
    tokenizer: Any,
    columns: Collection[str],
) -> ClassifierReward:
    table, role = f"reward.{reward.name}.model", reward.role
    settings: Any = reward.model
    hf_config, own = open_folder(config.model_of(role), table)
    if not plugins.overrides("engine_build_model"):
        check_classifier(hf_config, settings.path, table)
    same = settings.own_tokens and tokenizer is not None and tokenizer_hash(tokenizer) == tokenizer_hash(own)
    sequences = Sequences(own, settings.chat_template, settings.score_at == "end", table)
    if not same and "messages" in columns and settings.chat_template is None and not own.chat_template:
        raise DataError(
            f"{table}: the rows of the data are conversations, and its tokenizer has no chat template. Use a reward "
            "model that has one, or set chat_template = false to score the prompt as the actor saw it."
        )

    def infer(batch: Any, outputs: tuple[str, ...]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = group_of(role).call("infer", batch, outputs=outputs).result()
        return found

    return ClassifierReward(sequences, infer, longest(hf_config, settings.max_tokens), same)
