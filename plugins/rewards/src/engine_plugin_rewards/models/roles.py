"""The roles that the rewards of a run need, and the rewards that query them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import REWARD_PHASE as PHASE
from engine_core.contracts.runtime import Role, WorkerGroup
from engine_core.data import tokenizer_hash
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
    from engine_core.types import Batch, Request, Rollout

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
    makers: dict[str, Callable[..., ModelReward]] = {
        "model": _classifier,
        "judge": _judge,
        "verdict": _verdict,
    }
    made: dict[str, ModelReward] = {}
    for reward in config.reward:
        for kind in reward.models:
            asked = _Asked(config, reward, plugins, group_of, f"reward.{reward.name}.{kind}")
            made[reward.name] = makers[kind](asked, tokenizer, columns)
    return made


@dataclass(frozen=True)
class _Asked:
    """One reward's model, before it is built."""

    config: EngineConfig
    reward: RewardConfig
    plugins: PluginSet
    group_of: Callable[[str], WorkerGroup]
    table: str  # its name, for messages

    def open(self) -> tuple[Any, Any]:
        """Return its config and tokenizer."""
        return open_folder(self.config.model_of(self.reward.role), self.table)

    def infer(self, batch: Batch, outputs: tuple[str, ...]) -> Mapping[str, Any]:
        """Run ``infer`` of the role's workers."""
        found: Mapping[str, Any] = (
            self.group_of(self.reward.role).call("infer", batch, outputs=outputs).result()
        )
        return found

    def generate(self, requests: Sequence[Request]) -> Sequence[Rollout]:
        """Run ``generate`` of the role's workers."""
        done: Sequence[Rollout] = self.group_of(self.reward.role).call("generate", requests=requests).result()
        return done


def _classifier(asked: _Asked, tokenizer: Any, columns: Collection[str]) -> ClassifierReward:
    settings, (hf_config, own) = asked.reward.model, asked.open()
    assert settings is not None
    if not asked.plugins.overrides("engine_build_model"):
        spec: Any = asked.plugins.spec("train_engines", settings.backend)
        check_classifier(hf_config, settings.path, asked.table, remote=spec.remote)
    same = (
        settings.reuse_token_ids
        and tokenizer is not None
        and tokenizer_hash(tokenizer) == tokenizer_hash(own)
    )
    sequences = Sequences(own, settings.chat_template, settings.score_at == "end", asked.table)
    if not same and "messages" in columns and settings.chat_template is None and not own.chat_template:
        raise DataError(
            f"{asked.table}: the rows of the data are conversations, and its tokenizer has no chat template. Use a "
            "reward model that has one, or set chat_template = false to score the prompt as the actor saw it."
        )
    return ClassifierReward(sequences, asked.infer, longest(hf_config, settings.max_tokens), same)


def _verdict(asked: _Asked, tokenizer: Any, columns: Collection[str]) -> VerdictReward:
    settings, (hf_config, own) = asked.reward.verdict, asked.open()
    assert settings is not None
    questions = Questions(settings, own, asked.table)
    return VerdictReward(questions, asked.infer, longest(hf_config, settings.max_tokens), settings.verdicts)


def _judge(asked: _Asked, tokenizer: Any, columns: Collection[str]) -> JudgeReward:
    settings, (hf_config, own) = asked.reward.judge, asked.open()
    assert settings is not None
    questions, limit = Questions(settings, own, asked.table), longest(hf_config, settings.max_tokens)
    if limit <= settings.max_response_tokens:
        raise DataError(
            f"{asked.table}.max_response_tokens: {settings.max_response_tokens} leaves no room for a question in the "
            f"{limit} tokens of its model."
        )
    return JudgeReward(questions, asked.generate, limit, settings, asked.config.run.seed)


class RewardModels:
    """The part ``reward_models``, as ``engine_core.contracts.parts.RewardModels`` specifies."""

    roles = staticmethod(reward_roles)
    rewards = staticmethod(model_rewards)


REWARD_MODELS = RewardModels()
