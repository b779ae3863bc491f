"""Checks across the keys of a config, beyond the type of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from engine_core.config.choices import bare
from engine_core.config.evaluation import held_out_sets, sampling_problems, set_problems
from engine_core.config.read import key_text
from engine_core.config.schedule import boundaries, config_at, schedule_problems
from engine_core.config.wording import Problem

if TYPE_CHECKING:
    from engine_core.config.models import AlgorithmConfig, DataConfig, EngineConfig

FROZEN_READERS = ("ref", "teacher")
"""Roles that score the sampled sequences and whose frozen model may run in an inference engine."""


def cross_problems(config: EngineConfig, sections: Collection[str]) -> list[Problem]:
    """Return every problem between keys.

    Args:
        config: the config, with each valid option table in ``options``.
        sections: top-level tables that the trainer reads; others are not checked.
    """
    problems = [*_duplicates(config), *_values(config)]
    if "algorithm" in sections:
        problems += _adaptive(config)
    if "rollout" in sections:
        problems += _stopping(config, sections)
    if "eval" in sections:
        problems += set_problems(config)
    if {"eval", "rollout"} <= set(sections):
        problems += sampling_problems(config)
    broken = [Problem(("schedule", key), text) for key, text in schedule_problems(config)]
    for step in [1] if broken else boundaries(config):
        now = config if broken else config_at(config, step)
        when = f"from step {step} on ([schedule]): " if step > 1 else ""
        problems += [Problem(found.path, when + found.text) for found in _each_step(now, sections)]
    return problems + broken


def _duplicates(config: EngineConfig) -> Iterator[Problem]:
    chosen = [(("reward", reward.name), reward.name) for reward in config.reward]
    chosen += [(("stage", stage.name), stage.name) for stage in config.stage]
    chosen += [(("tracking", "trackers"), tracker) for tracker in config.tracking.trackers]
    chosen += [(("data", "mix"), part.name or str(number)) for number, part in enumerate(config.data.mix)]
    for (path, name), count in Counter(chosen).items():
        if count > 1:
            yield Problem(path, f"'{name}' is listed {count} times, expected once. Remove the others.")


def _rows(data: DataConfig) -> Iterator[Problem]:
    given = [key for key in ("train", "source", "mix") if any(getattr(data, key))]
    if len(given) > 1:
        empty = 'train = [], source = "", mix = []'
        text = f"data.{given[0]} is set too, and rows come from one key. Remove all others, or empty them ({empty})."
        yield Problem(("data", given[-1]), text)
    if len(data.mix) == 1:
        yield Problem(("data", "mix"), "got one part, expected two or more. Name its files in data.train.")
    if data.mix and data.curriculum:
        text = f"got '{data.curriculum}', which chooses among all rows, so the weights of data.mix have no effect. Remove one."
        yield Problem(("data", "curriculum"), text)
    for number, part in enumerate(data.mix):
        if any(part.path) == bool(part.source):
            text = f"names {'both' if part.source else 'neither'} of path and source, expected one of them."
            yield Problem(("data", "mix", part.name or str(number)), text)


def _values(config: EngineConfig) -> Iterator[Problem]:
    yield from _rows(config.data)
    for reward in config.reward:
        if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
            yield Problem(
                ("reward", reward.name, "clip"),
                f"got {list(reward.clip)}, expected [low, high] with low below high.",
            )
        if len(kinds := list(reward.models)) > 1:
            tables = " and ".join(f"[reward.{kind}]" for kind in kinds)
            yield Problem(("reward", reward.name, kinds[1]), f"{tables} are in one [[reward]]. Keep one.")
    trained = {"actor": config.actor, "critic": config.critic}
    for role, optim in ((role, table.optim) for role, table in trained.items() if table):
        if optim.decay_steps and optim.warmup_steps >= optim.decay_steps:
            yield Problem(
                (role, "optim", "decay_steps"),
                f"got {optim.decay_steps}, expected more than warmup_steps ({optim.warmup_steps}, included in it); or 0.",
            )
    if config.critic and config.run.steps and config.critic.warmup_steps >= config.run.steps:
        yield Problem(
            ("critic", "warmup_steps"),
            f"got {config.critic.warmup_steps}, expected less than run.steps ({config.run.steps}): the policy would "
            "never learn.",
        )


def _each_step(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    if "rollout" in sections and config.rollout.temperature == 0:
        yield Problem(
            ("rollout", "temperature"),
            "got 0, expected more than 0: a greedy sampler gives a prompt the same response every time, so the "
            "responses of a group are equal. For greedy evaluation set eval.temperature = 0.",
        )
    if "rollout" in sections:
        yield from _room(config, sections)
    if "algorithm" not in sections:
        return
    yield from _algorithm(config.algorithm)
    if config.ref_is_base and config.algorithm.kl_coef > 0 and config.algorithm.ref_refresh_steps > 0:
        yield Problem(
            ("algorithm", "ref_refresh_steps"),
            "the reference is the actor without its adapter ([actor.lora]), and the weights below an adapter never "
            "change. Set it to 0, or give the reference a separate model: [ref] path.",
        )
    mini, prompts = config.algorithm.mini_batch_prompts, config.data.prompts_per_step
    if mini and prompts % mini:
        fits = [size for size in range(1, prompts + 1) if prompts % size == 0]
        nearest = min(fits, key=lambda size: (abs(size - mini), size))
        yield Problem(
            ("algorithm", "mini_batch_prompts"),
            f"got {mini}, expected a divisor of data.prompts_per_step ({prompts}), such as {nearest}; or 0 for all.",
        )


def _room(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each engine whose `max_model_len` is less than a prompt and its response.

    Without this check a sampler would silently cut responses. A frozen model needs one more token; it would
    end the run at the first long sequence.
    """
    prompt = config.data.max_prompt_tokens
    learned = ("rollout.max_response_tokens", config.rollout.max_response_tokens)
    evaluated = [
        (key_text(held_out.key("max_response_tokens")), held_out.max_response_tokens)
        for held_out in held_out_sets(config)
        if "eval" in sections
    ]
    sampled = max([learned, *evaluated], key=lambda item: item[1])
    readers = [(role, getattr(config, role), learned, 1) for role in FROZEN_READERS if role in sections]
    for role, table, (key, response), more in [("rollout", config.rollout, sampled, 0), *readers]:
        held = getattr(table and table.options, "max_model_len", None)
        needed = prompt + response + more
        if isinstance(held, int) and needed > held:
            one_more = " and one more token" if more else ""
            yield Problem(
                (role, bare(table.backend), "max_model_len"),
                f"got {held}, but the longest prompt (data.max_prompt_tokens = {prompt}) and its response ({key} = "
                f"{response}){one_more} have {needed} tokens: long sequences would be cut or refused. Set it to "
                f"{needed}, or lower data.max_prompt_tokens or {key}.",
            )


def _stopping(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of options that stop responses before their end."""
    rollout, correction = config.rollout, config.algorithm.correction
    if config.environment is not None and "environment" in sections and rollout.on_timeout != "drop":
        yield Problem(
            ("rollout", "on_timeout"),
            "applies to single responses, but [environment] samples episodes: a turn that reaches "
            "rollout.request_timeout_seconds ends its episode, which follows environment.on_timeout. Remove it.",
        )
    if not (rollout.partial_rollouts and rollout.over_sampling > 1):
        return
    if "algorithm" not in sections:
        yield Problem(
            ("rollout", "partial_rollouts"),
            f"keeps tokens of older policies, which trainer '{config.trainer}' does not correct for. Remove it: "
            "stopped responses are then dropped.",
        )
    elif correction.level == "off" and not correction.bypass:
        yield Problem(
            ("algorithm", "correction", "level"),
            "got 'off', but rollout.partial_rollouts makes responses with tokens of several policies. Use 'token' (or "
            "'auto'), or set algorithm.correction.bypass = true.",
        )


def _adaptive(config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem for each adaptive weight that [schedule] sets as well."""
    for target, weight in (("kl_target", "kl_coef"), ("entropy_target", "entropy_coef")):
        if getattr(config.algorithm, target) is not None and f"algorithm.{weight}" in config.schedule:
            yield Problem(
                ("schedule", f"algorithm.{weight}"),
                f"algorithm.{target} adapts this weight. Remove one of the two.",
            )


def _algorithm(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield Problem(
            ("algorithm", "kl_target"),
            "the KL weight starts at algorithm.kl_coef and is only multiplied, so 0 stays 0. Set algorithm.kl_coef.",
        )
    low, high = algorithm.correction.mask_low, algorithm.correction.mask_high
    if low is not None and high is not None and low >= high:
        yield Problem(
            ("algorithm", "correction", "mask_low"), f"got {low}, expected less than mask_high ({high})."
        )
