"""Checks across the keys of a config, beyond the type of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from engine_core.config.choices import OPTIONAL_ROLES
from engine_core.config.evaluation import evaluation_problems
from engine_core.config.roles import RolloutConfig
from engine_core.config.schedule import boundaries, config_at, schedule_problems
from engine_core.config.wording import Problem
from engine_core.errors import did_you_mean
from engine_core.tables import CUTTING

if TYPE_CHECKING:
    from engine_core.config.models import AlgorithmConfig, CorrectionConfig, EngineConfig
    from engine_core.config.roles import OptimConfig, RoleConfig

FROZEN_READERS = ("ref", "teacher")
"""Roles that score the sampled sequences and whose frozen model may run in an inference engine."""

RENAMED_METRICS = {
    "async/cut": "async/aborted",
    "async/mixed_share": "async/mixed_version_share",
    "async/overtaken": "async/out_of_order_groups",
    "environment/limited": "environment/truncated",
    "sampling/too_old_groups": "sampling/stale_groups",
    "time/annotate": "time/log_probs",
    "time/switch": "time/offload_and_sync",
}
"""Old metric names and their new names. A run file with an old name is refused; the error names the new one."""


def cross_problems(config: EngineConfig, sections: Collection[str]) -> list[Problem]:
    """Return every problem between keys.

    Args:
        config: the config, with each valid option table in ``options``.
        sections: top-level tables that the trainer reads; others are not checked.
    """
    problems = [*_duplicates(config), *_placement(config), *_values(config), *_renamed_metrics(config)]
    if "algorithm" in sections:
        problems += _adaptive(config)
    if "rollout" in sections:
        problems += _stopping(config, sections)
        problems += _sparse_log_probs(config, sections)
    if {"eval", "rollout"} <= set(sections):
        problems += evaluation_problems(config)
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
    for (path, name), count in Counter(chosen).items():
        if count > 1:
            yield Problem(path, f"'{name}' is listed {count} times, expected once. Remove the others.")


def _renamed_metrics(config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem for each old metric name that the config uses."""
    named: dict[tuple[str, ...], str | None] = {
        ("run", "stop_above", name): name for name in config.run.stop_above
    }
    named["checkpoint", "best_metric"] = config.checkpoint.best_metric
    for path, name in named.items():
        if new := RENAMED_METRICS.get(name or ""):
            yield Problem(path, f"metric '{name}' was renamed to '{new}'.")


def _placement(config: EngineConfig) -> Iterator[Problem]:
    placement = config.placement
    for role in ("actor", "critic", "ref", "teacher", "rollout", "reward"):
        pool = getattr(placement, role)
        if pool is not None and pool not in placement.pools:
            yield Problem(
                ("placement", role),
                f"got '{pool}', expected a pool of placement.pools.{did_you_mean(pool, placement.pools)}",
            )
        elif pool is None and len(placement.pools) > 1 and role not in (*OPTIONAL_ROLES, "reward"):
            names = ", ".join(placement.pools)
            yield Problem(
                ("placement", role), f"missing. With several pools ({names}) each role must name its pool."
            )


def _values(config: EngineConfig) -> Iterator[Problem]:
    if config.data.source and any(config.data.train):
        yield Problem(
            ("data", "source"),
            f"got '{config.data.source}', but data.train names files. Rows come from one of them: remove the other, "
            'or empty it (train = [], source = "").',
        )
    for reward in config.reward:
        if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
            yield Problem(
                ("reward", reward.name, "clip"),
                f"got {list(reward.clip)}, expected [low, high] with low below high.",
            )
        if len(kinds := list(reward.models)) > 1:
            tables = " and ".join(f"[reward.{kind}]" for kind in kinds)
            yield Problem(("reward", reward.name, kinds[1]), f"{tables} are in one [[reward]]. Keep one.")
    for role, optim in _optims(config):
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


def _optims(config: EngineConfig) -> Iterator[tuple[str, OptimConfig]]:
    """Yield the role and the optimizer table of each trained model."""
    yield "actor", config.actor.optim
    if config.critic:
        yield "critic", config.critic.optim


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
    responses = {"rollout.max_response_tokens": config.rollout.max_response_tokens}
    if "eval" in sections and config.eval.max_response_tokens:
        responses["eval.max_response_tokens"] = config.eval.max_response_tokens
    for each in config.eval.set if "eval" in sections else ():
        if most := each.own.get("max_response_tokens"):
            responses[f"eval.set.{each.name}.max_response_tokens"] = most
    yield from _too_short("rollout", config.rollout, 0, config.data.max_prompt_tokens, responses)
    for role in FROZEN_READERS:
        if role in sections and (table := getattr(config, role)) is not None:
            learned = {"rollout.max_response_tokens": config.rollout.max_response_tokens}
            yield from _too_short(role, table, 1, config.data.max_prompt_tokens, learned)


def _too_short(
    role: str, table: RolloutConfig | RoleConfig, more: int, prompt: int, responses: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield a problem if the `max_model_len` of one engine is too small.

    Args:
        role: name of the engine's table.
        table: the table, with its backend and options.
        more: tokens that the engine needs in addition to prompt and response.
        prompt: length of the longest prompt, in tokens.
        responses: length of the longest response, in tokens, by the key that sets it.
    """
    held = getattr(table.options, "max_model_len", None)
    key, response = max(responses.items(), key=lambda item: item[1])
    needed = prompt + response + more
    if isinstance(held, int) and needed > held:
        room = held - response - more
        instead = f"data.max_prompt_tokens to {room}" if room > 0 else f"lower {key}"
        one_more = " and one more token" if more else ""
        yield Problem(
            (role, table.backend.rpartition(":")[2], "max_model_len"),
            f"got {held}, but the longest prompt (data.max_prompt_tokens = {prompt}) and its response ({key} = {response})"
            f"{one_more} have {needed} tokens: long sequences would be cut or refused. Set it to {needed}, or {instead}.",
        )


def _stopping(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of options that stop responses before their end."""
    rollout, correction = config.rollout, config.algorithm.correction
    if config.environment is not None and "environment" in sections:
        for key in ("request_timeout_seconds", "over_sampling"):
            if getattr(rollout, key) != RolloutConfig.model_fields[key].default:
                yield Problem(
                    ("rollout", key),
                    "applies to single responses, but [environment] samples episodes. Remove it; "
                    "environment.timeout_seconds limits an episode.",
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


def _sparse_log_probs(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if a step without the sampler's log-probs uses them for more than measuring the gap."""
    every, correction = config.rollout.log_probs_every_steps, config.algorithm.correction
    if every == 1:
        return
    where = ("rollout", "log_probs_every_steps")
    if "algorithm" not in sections or config.trainer != "rl":
        yield Problem(where, f"got {every}, expected 1: trainer '{config.trainer}' needs them in every step.")
    elif correction.bypass:
        yield Problem(
            where,
            f"got {every}, expected 1: with algorithm.correction.bypass they are the old log-probs of every update.",
        )
    elif wanted := [key for key in ("level", "mask", "reject") if getattr(correction, key) != "off"]:
        key = wanted[0]
        yield Problem(
            where,
            f"got {every}, but algorithm.correction.{key} = '{getattr(correction, key)}' reads log-probs in every "
            f"step. Set algorithm.correction.{key} = 'off' (the gap is then measured and not corrected), or leave this at 1.",
        )
    elif correction.off_policy_threshold is not None:
        yield Problem(
            where,
            f"got {every}, but algorithm.correction.off_policy_threshold reads log-probs in every step.",
        )
    elif cutting := config.rollout.cutting:
        kept = " and ".join(f"rollout.{key}" for key in cutting)
        yield Problem(where, f"got {every}, expected 1: the tokens that {kept} kept are sent with log-probs.")
    elif moved := [
        key
        for key in config.schedule
        if key.startswith("algorithm.correction.") or key in {f"rollout.{name}" for name in CUTTING}
    ]:
        yield Problem(where, f"got {every}, expected 1: [schedule] changes {moved[0]}, which needs them.")
    elif config.rollout.over_sampling > 1 or config.environment is not None:
        table = "[environment]" if config.environment is not None else "rollout.over_sampling"
        yield Problem(
            where, f"got {every}, expected 1: responses of {table} continue from one step into the next."
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


def without_effect(config: EngineConfig) -> dict[str, str]:
    """Return the keys that have no effect in any step, each with the reason. They are reported if a file sets them."""
    first, *later = [dict(_idle(config_at(config, step))) for step in boundaries(config)]
    return {key: why for key, why in first.items() if all(key in idle for idle in later)}


def without_learning(config: EngineConfig) -> Iterator[str]:
    """Yield a warning for each trained role whose learning rate is 0 in every step."""
    steps = [dict(_optims(config_at(config, step))) for step in boundaries(config)]
    for role in steps[0]:
        if all(optims[role].lr == 0 for optims in steps):
            yield f"{role}.optim.lr is 0 in every step: the weights of '{role}' do not change."


def _idle(config: EngineConfig) -> Iterator[tuple[str, str]]:
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        keys = ("kl_in", "kl_estimator", "ref_refresh_steps")
        yield from ((f"algorithm.{key}", "algorithm.kl_coef is 0") for key in keys)
    if config.ref_is_base:
        why = "the reference is the actor without its adapter ([actor.lora])"
        yield from ((f"ref.{key}", why) for key in ("backend", "path", "max_tokens_per_rank"))
    if algorithm.kl_target is None:
        yield "algorithm.kl_horizon", "algorithm.kl_target is not set"
    if algorithm.ref_refresh_steps == 0:
        yield "algorithm.ref_refresh_mix", "algorithm.ref_refresh_steps is 0"
    if algorithm.entropy_target is None:
        yield "algorithm.entropy_delta", "algorithm.entropy_target is not set"
    if algorithm.loss_aggregation != "seq-mean-token-sum-norm":
        yield "algorithm.loss_length_norm", f"algorithm.loss_aggregation is '{algorithm.loss_aggregation}'"
    if config.rollout.over_sampling == 1:
        yield "rollout.partial_rollouts", "rollout.over_sampling is 1: no response is stopped"
    if config.rollout.over_sampling == 1 or not config.rollout.partial_rollouts:
        yield (
            "rollout.partial_max_staleness",
            "nothing is carried over (rollout.over_sampling, rollout.partial_rollouts)",
        )
    if config.rollout.request_timeout_seconds == 0:
        yield "rollout.on_timeout", "rollout.request_timeout_seconds is 0"
    yield from _idle_correction(algorithm.correction)
    for reward in (reward for reward in config.reward if reward.has_model):
        of_workers = ("workers", "timeout_seconds", "on_timeout", "max_memory_gb")
        yield from ((f"reward.{reward.name}.{key}", "a model gives this reward") for key in of_workers)
    for role, optim in _optims(config):
        if optim.schedule == "constant":
            why = f"{role}.optim.schedule is 'constant'"
            yield from ((f"{role}.optim.{key}", why) for key in ("decay_steps", "min_lr_ratio"))


def _idle_correction(correction: CorrectionConfig) -> Iterator[tuple[str, str]]:
    held = {
        "level": ("cap", "normalize", "min_effective_sample_share"),
        "mask": ("mask_low", "mask_high"),
        "reject": ("reject_ratio",),
    }
    for switch, keys in held.items():
        if getattr(correction, switch) == "off":
            yield from (
                (f"algorithm.correction.{key}", f"algorithm.correction.{switch} is 'off'") for key in keys
            )
    if correction.mask == correction.reject == "off":
        yield "algorithm.correction.max_masked_share", "algorithm.correction has no mask and no reject"
