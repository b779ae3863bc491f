"""The checks for missing settings and incompatible backends of a run, without torch.

``check_complete`` collects every problem: missing keys, roles whose weights cannot be as requested (adapters,
``quantize``), samplers that cannot share weights, columns that nothing computes, parts that are not
installed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import plugins_for
from engine_core.config.choices import AUTO, OPTIONAL_ROLES
from engine_core.config.evaluation import held_out_sets
from engine_core.config.inputs import files_of
from engine_core.config.read import RawConfig, key_text
from engine_core.config.requirements import GREEDY, plan_run, producers_of
from engine_core.config.wording import placed
from engine_core.errors import ConfigError, PluginError, did_you_mean
from engine_core.plugins.metadata import unknown_name
from engine_core.specs import RefillOptions, resolve
from engine_core.tables import CUTTING

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import TrainerSpec


def check_complete(
    config: EngineConfig, live: Collection[str] = (), plugins: PluginSet | None = None
) -> None:
    """Raise one error for everything that a run needs and no file set.

    Args:
        config: from ``load_config``.
        live: which of ``model``, ``tokenizer``, ``data``, ``rewards`` are objects of the program.
        plugins: the plugins of the config, if they are loaded already.

    Raises:
        ConfigError: every missing setting.
        PluginError: a part that the run needs is not installed; nothing else was wrong.
    """
    plugins = plugins or plugins_for(config)
    spec: Any = plugins.spec("trainers", config.trainer)
    reads = spec.sections or type(config).model_fields
    missing = list(_role_problems(config, plugins, reads))
    if "rollout" in reads:
        missing += sharing_problems(config, plugins) if config.rollout.weights == "shared" else ()
        missing += custom_model_problems(config, plugins)
        missing += _sparse_log_probs(config, plugins, reads)
        missing += transport_problems(config, plugins)
    runtime: Any = plugins.spec("runtimes", config.runtime.backend)
    missing += resolve(runtime.check)(config) if runtime.check is not None else ()
    missing += _absent_tables(config, plugins, spec, live, reads)
    if config.data.curriculum and plugins.offered("parts", "curriculum"):
        missing += plugins.resolve("parts", "curriculum").problems(config, plugins, spec, live)
    if "algorithm" in reads:
        missing += _unmet(config, plugins)
    if "stage" in reads:
        missing += _stage_problems(config, plugins)
    absent = absent_parts(config, plugins, spec)
    source = config._source or RawConfig({})
    lines = [placed(line, source) for line in [*missing, *absent]]
    if missing:
        raise ConfigError(lines)
    if absent:
        raise PluginError("\n".join(lines))


def _absent_tables(
    config: EngineConfig, plugins: PluginSet, spec: TrainerSpec, live: Collection[str], reads: Collection[str]
) -> Iterator[str]:
    """Yield a problem for each table or key that the trainer or the evaluation needs and no file sets."""
    if not config.model.path and "model" not in live and "model" in reads:
        yield "model.path: missing. Expected a folder or a hub name like 'Qwen/Qwen3-0.6B' in [model]."
    others = (config.data.source or config.data.mix) and not spec.stored  # rollouts come from files alone
    if "data" in spec.required and not (files_of(config.data.train) or others or "data" in live):
        named = "files of rollouts" if spec.stored else "a JSONL, Parquet or CSV file, or a source,"
        yield f"data.train: missing. Expected {named} in [data]."
    if "teacher" in spec.required:
        yield from _teacher_missing(config, f"Trainer '{config.trainer}'")
    of_episodes = _of_episodes(config, plugins)
    rewarded = config.reward or of_episodes or "rewards" in live
    if "reward" in spec.required and not rewarded and _reads_rewards(config, plugins, reads):
        yield (
            f"reward: missing. Trainer '{config.trainer}' needs at least one [[reward]] with a name, or an [environment] "
            "that sets rewards."
        )
    if not rewarded and "algorithm" in reads and "reward" not in spec.required:
        advantage: Any = plugins.spec("advantages", config.algorithm.advantage)
        if "reward_terms" in advantage.needs:
            yield f"reward: missing. '{config.algorithm.advantage}' reads names and weights of [[reward]]: name those of the rollouts."
    evaluates = config.eval.during_training if "eval" in reads else ""
    if evaluates and "reward" in spec.for_eval and not rewarded:
        yield f"reward: missing. {evaluates} asks for scores: name a [[reward]], or remove {evaluates}."
    if evaluates and not held_out_sets(config):
        yield f"data.validation: missing. {evaluates} asks for scores on it: name a file, or remove {evaluates}."
    for key, name in config.chosen_metrics:
        if name.startswith("eval/") and not evaluates:
            yield f"{key}: got '{name}', but the run evaluates nothing. Set eval.every_steps, or name a metric of the steps."
    if {"eval", "reward"} <= set(reads) and (evaluates or "reward" not in spec.for_eval):
        names = [*(reward.name for reward in config.reward), *of_episodes]
        yield from _unjudged(config, plugins, names, "rewards" in live)


def _of_episodes(config: EngineConfig, plugins: PluginSet) -> list[str]:
    """Return the names of the rewards that the environment sets."""
    named = config.environment and config.environment.name
    spec: Any = plugins.find("environments", named) if named else None
    return sorted(spec.rewards) if spec else []


def _reads_rewards(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> bool:
    """Whether what is learned comes from rewards; an estimator may have another source."""
    if "algorithm" not in reads:
        return True
    advantage: Any = plugins.spec("advantages", config.algorithm.advantage)
    return any(column.startswith("reward") or column == GREEDY for column in advantage.needs)


def _teacher_missing(config: EngineConfig, who: str) -> list[str]:
    """Return the problem of a run that learns from a teacher and names none."""
    if config.teacher is not None and config.teacher.path:
        return []
    return [f"teacher.path: missing. {who} learns from a teacher: name its folder or hub name in [teacher]."]


def _role_problems(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> Iterator[str]:
    """Yield a problem for each role whose backend cannot train it, adapt it, or have its weights as its table asks.

    Args:
        config: the config.
        plugins: the plugins that offer the backends.
        reads: sections that the run's trainer reads.
    """
    for role in ("actor", *OPTIONAL_ROLES):
        table = getattr(config, role) if role in reads else None
        if table is None:
            continue
        backend: Any = plugins.find("train_engines", table.backend)
        if getattr(backend, "frozen_only", False) and role != "teacher":
            yield (
                f"{role}.backend: '{table.backend}' runs models that are never trained, those of a teacher and of rewards. "
                f"Choose another {backend.noun} for [{role}] (engine plugins)."
            )
        if table.lora is not None and "lora" not in getattr(backend, "capabilities", ()):
            yield (
                f"{role}.lora: backend '{table.backend}' trains no adapters (it has no capability 'lora'). "
                'Take the table out, or use backend = "torch".'
            )
        elif check := getattr(backend, "check_role", None):
            yield from resolve(check)(role, table)


def _unjudged(config: EngineConfig, plugins: PluginSet, names: Sequence[str], more: bool) -> Iterator[str]:
    """Yield a problem for each set whose score or vote is of an unknown reward, or of one that extracts no answers.

    Args:
        config: the config with its rewards.
        plugins: the plugins that offer them.
        names: the rewards of the run.
        more: the program brings rewards, whose names are not known here.
    """
    votes = ["off", "text", *(n for n in names if getattr(plugins.find("rewards", n), "answers", False))]
    for held_out in held_out_sets(config):
        for key, name in [*(("rewards", name) for name in held_out.rewards), ("score", held_out.score)]:
            own = held_out.rewards if key == "score" else []
            if name and name not in (own or names) and not more:
                whose = "is not in rewards of the set" if own else "is no reward of the run"
                yield f"{key_text(held_out.key(key))}: got '{name}', which {whose}.{did_you_mean(name, own or names)}"
        key, vote = key_text(held_out.key("majority")), held_out.majority
        if vote not in votes and not (more and vote not in names):
            known = ", ".join(map(repr, votes))
            yield f"{key}: got '{vote}', expected one of {known}: 'text', or a [[reward]] of the run that extracts answers."


def _unmet(config: EngineConfig, plugins: PluginSet) -> Sequence[str]:
    """Return a problem for each column and output that the algorithm needs and nothing computes."""
    advantage: Any = plugins.spec("advantages", config.algorithm.advantage)
    loss: Any = plugins.spec("losses", config.algorithm.loss)
    try:
        plan = plan_run(config, advantage, loss, producers_of(plugins, advantage, loss))
    except ConfigError as error:
        return error.problems
    who = f"algorithm.advantage = '{config.algorithm.advantage}'"
    return _teacher_missing(config, who) if plan.needs("teacher") else []


def _sparse_log_probs(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> Iterator[str]:
    """Yield a problem if a step without the sampler's log-probs uses them for more than measuring the gap."""
    every, correction = config.rollout.log_probs_every_steps, config.algorithm.correction
    if every == 1:
        return
    chosen = {"advantage": "advantages", "loss": "losses"} if "algorithm" in reads else {}
    learns = [(key, plugins.spec(kind, getattr(config.algorithm, key))) for key, kind in chosen.items()]
    stages = [stage.name for stage in config.stage if "stage" in reads]
    cutting = {f"rollout.{name}" for name in CUTTING}
    used: dict[str, Any] = {
        f"trainer = '{config.trainer}'": "algorithm" not in reads or config.trainer != "rl",
        **{
            f"algorithm.correction.{key}": getattr(correction, key) != "off"
            for key in ("level", "mask", "reject")
        },
        "algorithm.correction.bypass": correction.bypass,
        "algorithm.correction.off_policy_threshold": correction.off_policy_threshold is not None,
        **{f"algorithm.{key}": "rollout_log_probs" in getattr(spec, "needs", ()) for key, spec in learns},
        **{key: key.startswith("algorithm.correction.") or key in cutting for key in config.schedule},
        **{f"rollout.{key}": True for key in config.rollout.cutting},
        "rollout.over_sampling": config.rollout.over_sampling > 1,
        **{f"stage.{name}": getattr(plugins.spec("stages", name), "off_policy", False) for name in stages},
        "[environment]": config.environment is not None,
    }
    if readers := [key for key, needs in used.items() if needs]:
        yield (
            f"rollout.log_probs_every_steps: got {every}, expected 1: log-probs of every step are needed by "
            f"{' and '.join(readers)}."
        )


def _stage_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Yield a problem for each stage that brings in older rollouts before a stage that refills."""
    refills = [isinstance(stage.options, RefillOptions) for stage in config.stage]
    for number, stage in enumerate(config.stage):
        spec: Any = plugins.spec("stages", stage.name)
        if spec.off_policy and any(refills[number:]):
            last = config.stage[max(i for i, refill in enumerate(refills) if refill)].name
            yield (
                f"stage.{stage.name}: stands before '{last}', which has groups replaced in rounds; rollouts of earlier "
                f"steps would count as replacements. Put it after '{last}'."
            )


def sharing_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Why a sampler that is to use the actor's module cannot."""
    trainer: Any = plugins.spec("train_engines", config.actor.backend)
    sampler: Any = plugins.spec("rollout_engines", config.rollout.backend)
    actor, rollout, placement = config.actor.backend, config.rollout.backend, config.placement
    reasons = {
        "with [rollout.process] the sampler is in a separate process": config.rollout.process is not None,
        f"backend '{rollout}' has separate weights (no capability 'share_module')": (
            "share_module" not in sampler.capabilities
        ),
        f"actor.backend '{actor}' does not give its module to samplers (no capability 'generation_module')": (
            "generation_module" not in trainer.capabilities
        ),
        f"the sampler is in pool '{placement.rollout}' and the actor in '{placement.actor}'": (
            len(placement.pools) > 1 and placement.actor != placement.rollout
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            yield f'rollout.weights = \'shared\': {reason}. Set rollout.weights = "own" or "auto".'


def custom_model_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Yield why a sampler with separate weights cannot have the actor's model, if a plugin builds that."""
    backends = (("rollout_engines", config.rollout.backend), ("train_engines", config.actor.backend))
    sampler, trainer = (plugins.find(*backend) for backend in backends)
    if sampler is None or trainer is None:  # the trainer samples nothing
        return
    if config.rollout.weights != "own" and not any(sharing_problems(config, plugins)):
        return
    asked, own = plugins.asked(*backends), getattr(trainer, "own_model", False)
    builders = [plugin.label for plugin in asked if hasattr(plugin.module, "engine_build_model")]
    hooks = {
        hook for hook in ("engine_map_weights", "engine_register_model") if plugins.overrides(hook, asked)
    }
    if "engine_map_weights" in hooks or not (builders or own):
        return
    who = f"rollout.backend = '{config.rollout.backend}' has separate weights here"
    if "custom_model" in getattr(sampler, "capabilities", ()):
        if not builders:
            yield (
                f"{who}, and actor.backend '{config.actor.backend}' builds a model that it cannot build: no plugin has "
                "the hook engine_build_model. Implement it in the plugin of that backend (role 'rollout'), or have the sampler "
                "use the actor's module. Documentation: 'Custom models'."
            )
    elif "engine_register_model" not in hooks:
        whose = " and ".join(builders) or f"actor.backend '{config.actor.backend}'"
        yield (
            f"{who} and builds its model itself, but {whose} builds models (engine_build_model), and nothing says which "
            "weights the sampler gets. Implement engine_map_weights or engine_register_model, or use a sampler with the "
            "capability 'custom_model'. Documentation: 'Custom models'."
        )


def transport_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Yield why the transport of weights that the file names cannot carry them from actor to sampler."""
    wanted = config.rollout.transport
    runtime: Any = plugins.spec("runtimes", config.runtime.backend)
    actor, sampler = (config.placement.pool_of(role) for role in ("actor", "rollout"))
    apart = not runtime.in_process and actor != sampler
    if wanted == AUTO["weight_transports"]:
        return
    spec: Any = plugins.spec("weight_transports", wanted)
    if ("disaggregated" if apart else "colocated") not in spec.serves:
        pools = f"the sampler is in pool '{sampler}', the actor in '{actor}'"
        where = pools if apart else "the sampler is in the actor's processes"
        yield (
            f"rollout.transport: got '{wanted}', which does not carry weights here: {where}. Use 'auto', another transport "
            "(engine plugins), or another [placement]."
        )


def absent_parts(config: EngineConfig, plugins: PluginSet, spec: TrainerSpec) -> list[str]:
    """Return a line for each part that the run needs and no installed plugin offers.

    Args:
        config: of the run.
        plugins: of the run.
        spec: of its trainer.
    """
    sections = spec.sections or set(type(config).model_fields)
    evaluates = "eval" in sections and config.eval.during_training
    read = sections if evaluates else sections - spec.for_eval
    models = [reward for reward in config.reward if reward.has_model]
    workers = [reward for reward in config.reward if not reward.has_model and reward.workers != 0]
    streams = config.rollout.stream_update or config.rollout.stream_deterministic
    stops = config.rollout.over_sampling > 1 and "rollout" not in spec.for_eval
    needed = {  # part -> the key that asks for it, empty if none does
        "reward_models": f"reward.{models[0].name}" if models else "",
        "reward_workers": f"reward.{workers[0].name}.workers" if workers else "",
        "episodes": "environment" if config.environment is not None else "",
        "row_workers": "data.num_workers" if config.data.num_workers else "",
        "sampler_process": "rollout.process" if config.rollout.process is not None else "",
        "curriculum": "data.curriculum" if config.data.curriculum else "",
        "set_metrics": config.eval.during_training if evaluates and "rollout" in sections else "",
        "trackers": "tracking.trackers" if config.tracking.trackers else "",
        "early_stop": "rollout.over_sampling" if stops else "",
        "stream_update": "rollout.stream_update" if streams and "algorithm" in sections else "",
    }
    return [
        f"{key}: {unknown_name('parts', part)}"
        for part, key in needed.items()
        if key.partition(".")[0] in read and not plugins.offers("parts", part)
    ]
