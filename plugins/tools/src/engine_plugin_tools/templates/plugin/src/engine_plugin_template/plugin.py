"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Options, Reward


class TemplateOptions(Options):
    """``[reward.template_reward]``: checked when the run file is read, shown by ``engine schema``."""

    max_words: int = Field(default=20, gt=0)
    """Longest response that still earns the reward, in words."""


def template_reward(completions: Sequence[str], max_words: int) -> list[float]:
    """Return 1 for a response of at most ``max_words`` words, else 0.

    A reward takes the arguments that it names: ``completions``, ``prompts``, ``token_ids``, any
    column of the data (``answer``, ...), and its own options.

    Args:
        completions: [B] response texts.
        max_words: from the options.

    Returns:
        [B] floats, one for each response; None where the reward does not apply.
    """
    return [1.0 if len(text.split()) <= max_words else 0.0 for text in completions]


@hookimpl
def engine_rewards() -> Mapping[str, Reward]:
    return {"template_reward": Reward(load=template_reward, config=TemplateOptions)}


# Other hooks are added in the same way; `engine_core.hooks` documents each. Take only the arguments you need:
#
#   def engine_build_model(role, model_config, options):     a custom architecture or a value head
#   def engine_wrap_policy(module):                          the units of sharding and checkpointing
#   def engine_shard_model(module, units, options):          how the model is distributed
#   def engine_build_optimizer(module, optim_config):        an optimizer and its schedule
#   def engine_train_engines():                              {"name": TrainBackend(load="module:Class")}
#   def engine_rollout_engines():                            {"name": RolloutBackend(load="module:Class")}
#   def engine_advantages():                                 {"name": Advantage(load=function)}
#   def engine_losses():                                     {"name": Loss(load=function)}
#   def engine_stages():                                     {"name": Stage(load=function)}
#   def engine_environments():                               {"name": Environment(load=function)}
#   def engine_on_event(event, step, data):                  observe events of a run
#
# A table's name also needs a line in pyproject.toml; after a change there, install again.
