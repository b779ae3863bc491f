"""``[environment]``: responses of several turns, with tools or simulated users between them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine_core.config.tables import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Table


class EnvironmentConfig(Table):
    """``[environment]``: where the table is present, each rollout is an episode of this environment, in training and evaluation."""

    name: str
    """The environment, by name (``engine plugins``); its options stand in ``[environment.NAME]``."""
    reward_weights: dict[str, float] = {}
    """Factors of the rewards that the episodes set themselves, by name, in the sum of rewards; default: 1. 0 only measures."""
    max_turns: PositiveInt = 8
    """Times that the policy is asked in one episode; each is cut after `rollout.max_response_tokens`."""
    max_tokens: PositiveInt | None = None
    """Tokens of an episode, prompt and answers of tools included; default: what the model can hold."""
    timeout_seconds: PositiveFloat = 600.0
    """Time for one episode from its start, waiting for the sampler included; after it the episode follows `on_timeout`."""
    tool_timeout_seconds: PositiveFloat = 10.0
    """Time for one call of a tool; after it the policy is told that there was no answer."""
    max_concurrent: NonNegativeInt = 0
    """Episodes that run at once; 0: all of a step."""
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """When an episode raises, or never asks the policy: leave its rollout out of the update, give it reward 0, or end the run."""
    on_timeout: Literal["drop", "zero", "fail"] = "drop"
    """The same for one that misses its deadline."""
    max_failure_share: Fraction = 0.5
    """A step in which more than this share of episodes failed ends the run."""
    options: Any = Field(default=None, exclude=True)
    """The environment's own table, filled in by the loader."""
