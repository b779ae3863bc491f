"""The roles that the rewards of a run need, and the rewards that query them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import REWARD_PHASE as PHASE
from engine_core.contracts.runtime import Role, WorkerGroup
from engine_core.data import tokenizer_hash
from engine_core.data.tokenizer import end_tokens
from engine_core.errors import DataError
from engine_plugin_rewards.models.classifier import ClassifierReward
from engine_plugin_rewards.models.folders import check_classifier, longest, open_folder
from engine_plugin_rewards.models.judge import JudgeReward
from engine_plugin_rewards.models.questions import Questions
from engine_plugin_rewards.models.sequences import Sequences
from engine_plugin_rewards.models.verdict import VerdictReward

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.rewards import RewardConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.rewards import ModelReward
    from engine_core.types import Batch, Request

ROLES: Mapping[str, Role] = {
    "model": Role("train", trainable=False, engine_role="reward_model", phase=PHASE),
    "judge": Role("rollout", engine_role="judge", phase=PHASE),
    "verdict": Role("train", trainable=False, engine_role="judge", phase=PHASE),
}
"""Roles by the table of a reward."""


def reward_roles(config: EngineConfig) -> dict[str, Role]:
    """Return the models of the rewards, by role: ``reward.NAME``."""
    return {reward.role: ROLES[kind] for reward in config.reward for kind in reward.models}


def model_rewards(
    config: EngineConfig,
    plugins: PluginSet,
    group_of: Callable[[str], WorkerGroup],
    tokenizer: Any = None,
    columns: Collection[str] = (),
) -> dict[str, ModelReward]:
    """Build the rewards by models, by name, and check all that can be checked before a model is built.

    Args:
        config: the run's config.
        plugins: the run's plugins; if one builds custom models, their folders are not checked.
        group_of: returns the workers of a role; called only when a value is needed.
        tokenizer: the actor's; None: there are no sampled tokens, only texts.
        columns: names of the data's columns.

    Raises:
        EngineError: a model's folder, template or limit does not suit its reward.
    """
    return {
        reward.name: _model_reward(kind, config, reward, plugins, group_of, tokenizer, columns)
        for reward in config.reward
        for kind in reward.models
    }


def _model_reward(
    kind: str,
    config: EngineConfig,
    reward: RewardConfig,
    plugins: PluginSet,
    group_of: Callable[[str], WorkerGroup],
    tokenizer: Any,
    columns: Collection[str],
) -> ModelReward:
    settings: Any = reward.own_model
    table = f"reward.{reward.name}.{kind}"
    model = config.model_of(reward.role)
    hf_config, own = open_folder(model, table)
    limit = longest(hf_config, settings.max_tokens)

    def infer(batch: Batch, outputs: tuple[str, ...]) -> Any:
        """Run ``infer`` of the role's workers."""
        return group_of(reward.role).call("infer", batch, outputs=outputs).result()

    def generate(requests: Sequence[Request]) -> Any:
        """Run ``generate`` of the role's workers."""
        return group_of(reward.role).call("generate", requests=requests).result()

    if kind == "model":
        if not plugins.overrides("engine_build_model"):
            spec: Any = plugins.spec("train_engines", settings.backend)
            check_classifier(hf_config, settings.path, table, remote=spec.remote)
        known = settings.reuse_token_ids and tokenizer is not None
        same = known and tokenizer_hash(tokenizer) == tokenizer_hash(own)
        sequences = Sequences(own, settings.chat_template, settings.score_at == "end", table)
        if not same and "messages" in columns and settings.chat_template is None:
            sequences.check_template()
        return ClassifierReward(sequences, infer, limit, same)
    questions = Questions(settings, own, table)
    if kind == "verdict":
        return VerdictReward(questions, infer, limit, settings.verdicts)
    if limit <= settings.max_response_tokens:
        raise DataError(
            f"{table}.max_response_tokens: {settings.max_response_tokens} leaves no room for a question in the "
            f"{limit} tokens of its model."
        )
    return JudgeReward(questions, generate, limit, settings, config.run.seed, end_tokens(model))


class RewardModels:
    """The part ``reward_models``, as ``engine_core.contracts.parts.RewardModels`` specifies."""

    roles = staticmethod(reward_roles)
    rewards = staticmethod(model_rewards)


REWARD_MODELS = RewardModels()
