"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_core import hookimpl
from engine_core.specs import Environment, Options


class TemplateOptions(Options):
    """``[environment.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    again: str = " No. Again: "
    """What a wrong guess is answered."""


async def template_name(episode: Any, again: str) -> Any:
    """Let the policy guess the column ``answer`` until it is right or has no turn left.

    Args:
        episode: prompt, turns and tokens; the page 'Multi-turn episodes and tools' lists what it has.
        again: from the options.

    Returns:
        The episode as a rollout, with its reward ``solved``.
    """
    answer = str(episode.prompt.columns["answer"])
    turn = await episode.sample(max_tokens=4)
    while turn.text.strip() != answer and episode.goes_on:
        episode.append(again)
        turn = await episode.sample(max_tokens=4)
    return episode.rollout({"solved": float(turn.text.strip() == answer)})


@hookimpl
def engine_environments() -> Mapping[str, Environment]:
    spec = Environment(
        load=template_name, config=TemplateOptions, rewards=frozenset({"solved"}), needs=frozenset({"answer"})
    )
    return {"template_name": spec}
