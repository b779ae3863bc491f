"""Plugin hooks: every point at which a plugin can change the engine.

Three kinds of hook:

* **Step hooks** decide one step of building a model. They are called *per role*: first the plugins of
  ``plugins = [...]`` (the last one named first), then the plugin of the role's backend, then the core's default.
  Plugins of other roles' backends are not called, so an actor and a critic on different backends do not interfere.
  The sampler has the actor's model: for it (role ``rollout``) the plugin of the actor's backend is called too, last.
* **Table hooks** offer names for the TOML. Each returns ``{name: spec}`` with the specs of
  ``engine_core.specs``, cheap to import; a spec is resolved in the worker that uses it.
* **Observers** receive events and may end the run. A failing observer is reported and does not stop training.

Implement a hook with the marker of the core; take only the arguments you need::

    from engine_core import hookimpl


    @hookimpl
    def engine_wrap_policy(module):
        return [name for name, child in module.named_modules() if isinstance(child, MyBlock)]

A plugin is a module with such functions. A run loads it in one of three ways:

1. an entry point ``engine.<kind>`` for each name of a table (such as ``engine.rewards``), if the TOML uses the name;
2. an entry point ``engine.plugins`` for step hooks and observers, if named in ``plugins = [...]``;
3. a path ending in ``.py`` in ``plugins = [...]``: a plugin in one file.

A test freezes the signatures: arguments may be added in a minor version, never renamed or removed before a major one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from engine_core.config import ModelConfig, OptimConfig
    from engine_core.specs import (
        Advantage,
        Column,
        Command,
        DataSource,
        Environment,
        Loss,
        Objective,
        Options,
        PairLoss,
        Part,
        Reward,
        RolloutBackend,
        RuntimeSpec,
        Stage,
        TrackerSpec,
        TrainBackend,
        TrainerSpec,
        TransportSpec,
    )

hookspec = pluggy.HookspecMarker("engine")
hookimpl = pluggy.HookimplMarker("engine")

# -------------------------------------------------------------------------
# Step hooks: how the model of one role is built, and how a sampler receives it. One result each.
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def engine_build_model(
    role: str, model_config: ModelConfig, options: Any, plugin_options: Any
) -> nn.Module | None:
    """Build the module of one role: a custom architecture, a value head, a modified checkpoint.

    :param role: ``actor``, ``ref``, ``critic``, ``reward_model`` (a trained one, or a reward's), ``judge``; ``rollout``
        for a sampler with separate weights (capability ``custom_model``), in any process.
    :param model_config: the ``[model]`` table, or a reward's equivalent of it; ``model_config.path`` is a folder in the
        layout of ``save_pretrained``, ``model_config.override`` holds changes to its config.
    :param options: the role's backend table (``[actor.torch]`` and the like).
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: a module with its weights loaded. Its ``forward`` takes ``input_ids`` and ``position_ids`` of shape [1, T]
        and returns logits [1, T, V], or an object with ``logits``; a ``PreTrainedModel`` may also take ``use_cache`` and
        ``past_key_values``. For ``critic`` and ``reward_model``: a transformers
        model with a head ``score`` (hidden size to 1), or a module that returns values [1, T], or an object with
        ``values``. Each value is computed from its token and those before it. The engine moves a critic's value to
        the next token: the output ``values[t]`` is the value before token t is sampled. For ``rollout``: the actor's module; the first update
        replaces its weights.

    Stops at the first answer. Default: ``AutoModelForCausalLM`` from ``[model]``; its decoder with a new or loaded head
    for ``critic`` and ``reward_model``.

    Called once for each role, in the worker, before anything is wrapped or sharded, on every rank; for ``rollout`` in
    the sampler's process, unless the sampler uses the actor's module. Not collective.
    """


@hookspec(firstresult=True)
def engine_map_weights(
    sampler: str,
    weights: Iterator[tuple[str, Tensor]],
    model_config: ModelConfig,
    options: Any,
    plugin_options: Any,
) -> Iterable[tuple[str, Tensor]] | None:
    """Map the actor's weights for the sampler: rename, merge or omit weights.

    Example: one prefix is removed, and a value head left out::

        @hookimpl
        def engine_map_weights(weights):
            return ((name.removeprefix("policy."), w) for name, w in weights if name != "value.weight")

    :param sampler: the backend of ``[rollout]``.
    :param weights: names as ``save_pretrained`` writes them and full (unsharded) tensors, gathered on iteration: a
        generator keeps few in memory, a list keeps the whole model. Do not change them in place: some are the actor's.
    :param model_config: the ``[model]`` table.
    :param options: the sampler's backend table (``[rollout.NAME]``).
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: names and tensors that the sampler loads; return ``weights`` itself if the names are right.

    Stops at the first answer. Default: the weights unchanged.

    Called for each update of a sampler with separate weights that takes whole models (not an adapter alone), in the
    actor's workers, on the ranks that send. Reading ``weights`` is collective: the engine reads what the hook left.
    """


@hookspec(firstresult=True)
def engine_register_model(
    sampler: str, model_config: ModelConfig, options: Any, plugin_options: Any
) -> Mapping[str, Any] | None:
    """Register the actor's architecture with the library of a sampler that builds its models itself.

    :param sampler: the backend of ``[rollout]``.
    :param model_config: the ``[model]`` table.
    :param options: the sampler's backend table (``[rollout.NAME]``).
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: changes to the model's config for this sampler, such as ``{"architectures": ["MyModel"]}``. None: the
        library knows the model, or ``engine_map_weights`` maps it to a model that the library knows.

    Stops at the first answer. Default: the library finds the architecture that the model's config names.

    Called once in such a sampler's process, before its library starts, on every rank of its pool; not for a sampler that
    calls ``engine_build_model``. Not collective.
    """


@hookspec(firstresult=True)
def engine_wrap_policy(role: str, module: nn.Module, options: Any, plugin_options: Any) -> list[str] | None:
    """Name the submodules that are units of sharding, activation checkpointing and compilation.

    :param role: as in ``engine_build_model``.
    :param module: the role's module, not yet wrapped.
    :param options: the role's backend table.
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: names as in ``module.named_modules()``, none inside another.

    Stops at the first answer. Default: the decoder layers (the longest ``ModuleList``).

    Called once for each role, after ``engine_build_model``, on every rank. Not collective.
    """


@hookspec(firstresult=True)
def engine_shard_model(
    role: str, module: nn.Module, units: list[str], options: Any, plugin_options: Any
) -> nn.Module | None:
    """Shard the model over ranks, as FSDP does.

    An implementation keeps this order: tensor-parallel plan, activation checkpointing, compile, sharding.

    :param role: as in ``engine_build_model``.
    :param module: the role's module, not yet wrapped.
    :param units: the names that ``engine_wrap_policy`` returned.
    :param options: the role's backend table (``[actor.fsdp]`` and the like).
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: the module to train, the same object or a wrapper of it.

    Stops at the first answer. Default: activation checkpointing if the backend's table asks for it, no sharding.

    Called once for each role, on every rank. Collective: it may communicate.
    """


@hookspec(firstresult=True)
def engine_build_optimizer(
    role: str, module: nn.Module, optim_config: OptimConfig, options: Any, plugin_options: Any
) -> tuple[Optimizer, LRScheduler | None] | None:
    """Build the optimizer and the learning-rate schedule of one role.

    :param role: as in ``engine_build_model``; a reference model has no optimizer.
    :param module: the result of ``engine_shard_model``.
    :param optim_config: the role's ``optim`` table (``[actor.optim]``). Its ``decay_steps`` is the number of optimizer
        steps after which a schedule ends: if the run file has 0, the run's length (0 only if that is unknown).
    :param options: the role's backend table.
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: ``(optimizer, lr_scheduler)``. The optimizer holds every parameter that requires gradients; its groups may
        have different rates, the largest being ``optim_config.lr``. The engine steps the scheduler once after each
        optimizer step that was not skipped. A scheduler of None keeps the rates constant.

    Stops at the first answer. Default: AdamW, with the schedule that ``optim_config`` names.

    Called once for each trained role (not for ``ref``), after ``engine_shard_model``, on every rank.
    Not collective.
    """


# -------------------------------------------------------------------------
# Table hooks: names for the TOML. All results are collected.
# -------------------------------------------------------------------------


@hookspec
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer train engines: ``[actor] backend = "NAME"``, options in ``[actor.NAME]``.

    :returns: ``TrainBackend`` by name; its ``load`` is a subclass of
        ``engine_core.contracts.engines.TrainEngine``, imported only in the workers that use it::

            @hookimpl
            def engine_train_engines():
                return {"mine": TrainBackend(load="my_plugin.engine:MyEngine", config=MyOptions)}

    Collects the tables of the plugins that the run uses; a name in the plugin's metadata that the table lacks is an
    error. Entry-point group ``engine.train_engines``.

    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer rollout engines: ``[rollout] backend = "NAME"``, options in ``[rollout.NAME]``.

    :returns: ``RolloutBackend`` by name; its ``load`` is a subclass of
        ``engine_core.contracts.engines.RolloutEngine``, imported only in the workers that use it.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.rollout_engines``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_rewards() -> Mapping[str, Reward]:
    """Offer rewards: ``[[reward]] name = "NAME"``, options in ``[reward.NAME]``.

    A reward receives what its parameters name: ``completion`` of one sample or ``completions`` of many, columns, options.

    :returns: ``Reward`` by name; its ``load`` returns a float for each sample, or None where it does not apply.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.rewards``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_advantages() -> Mapping[str, Advantage]:
    """Offer advantage estimators: ``[algorithm] advantage = "NAME"``, options in ``[algorithm.NAME]``.

    :returns: ``Advantage`` by name, which declares the columns that it needs.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.advantages``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_losses() -> Mapping[str, Loss]:
    """Offer policy losses: ``[algorithm] loss = "NAME"``, options in ``[algorithm.NAME]``.

    :returns: ``Loss`` by name, which declares the outputs and columns that it reads.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.losses``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_pair_losses() -> Mapping[str, PairLoss]:
    """Offer losses of pairs of responses: ``[dpo] loss = "NAME"``.

    :returns: ``PairLoss`` by name, which declares its function's arguments and the keys of ``[dpo]`` that it reads:
        ``PairLoss(load=squared)`` with ``def squared(chosen, rejected, beta)``.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.pair_losses``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_stages() -> Mapping[str, Stage]:
    """Offer stages between rewards and advantages: ``[[stage]] name = "NAME"``, options in ``[stage.NAME]``.

    :returns: ``Stage`` by name; its function is called with the step's scored rollouts, the step and its options. It
        returns the rollouts to train on (some, all, repeated, in any order) and numbers that are logged as
        ``stage/NAME/...``. A stage that keeps state between steps is a class; its ``state`` is saved in checkpoints.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.stages``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_environments() -> Mapping[str, Environment]:
    """Offer multi-turn environments: ``[environment] name = "NAME"``, options in ``[environment.NAME]``.

    An environment is an ``async def`` that receives an episode (the prompt and its row, the tokenizer, the policy), samples
    turns of the policy, appends observations, and returns the rollout.

    :returns: ``Environment`` by name.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.environments``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_trackers() -> Mapping[str, TrackerSpec]:
    """Offer trackers: ``[tracking] trackers = ["NAME"]``, options in ``[tracking.NAME]``.

    :returns: ``TrackerSpec`` by name.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.trackers``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer training loops: ``trainer = "NAME"``, options in ``[NAME]``.

    :returns: ``TrainerSpec`` by name, which declares the tables of the run file that it reads.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.trainers``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer runtimes: ``[runtime] backend = "NAME"``, options in ``[runtime.NAME]``.

    :returns: ``RuntimeSpec`` by name; its ``check`` validates the options and ``[placement]`` from the run file alone.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.runtimes``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_weight_transports() -> Mapping[str, TransportSpec]:
    """Offer weight transports between processes: ``[rollout] transport = "NAME"``, options in ``[rollout.NAME]``.

    :returns: ``TransportSpec`` by name, which declares the topologies that it supports; its ``load`` is a subclass of
        ``engine_core.contracts.weight_transport.WeightTransport``, imported in the controller if the run file names it
        and in the workers that use it.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.weight_transports``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_objectives() -> Mapping[str, Objective]:
    """Offer objectives, which train engines differentiate: ``LossCall("NAME", {...})``.

    :returns: ``Objective`` by name; its function is called in the worker with the outputs of the forward pass, the
        micro-batch and the parameters of the call::

            def squared(outputs, batch, scale):
                losses = scale * outputs["log_probs"] ** 2  # [T]
                mean = (batch["token_share"] * losses.detach()).sum()
                return (batch["weights"] * losses).sum(), {"mean": mean}


            @hookimpl
            def engine_objectives():
                return {"squared": Objective(load=squared)}

    Collects, as ``engine_train_engines``. Entry-point group ``engine.objectives``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_columns() -> Mapping[str, Column]:
    """Offer columns that estimators and losses may need, with the role or function that computes them.

    :returns: ``Column`` by name: an output of a role's ``infer``, or a function of columns that exist already::

            def surprise(batch):
                return -batch["old_log_probs"]  # [T]


            @hookimpl
            def engine_columns():
                return {"surprise": Column(load=surprise, needs=frozenset({"old_log_probs"}))}

    Collects, as ``engine_train_engines``. Entry-point group ``engine.columns``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_data_sources() -> Mapping[str, DataSource]:
    """Offer data sources: ``[data] source = "NAME"``, options in ``[data.NAME]``.

    :returns: ``DataSource`` by name; its function returns the rows of a split::

            def squares(split, count):
                first = 0 if split == "train" else count
                return [{"prompt": f"{i}*{i}=", "answer": str(i * i)} for i in range(first, first + count)]


            @hookimpl
            def engine_data_sources():
                return {"squares": DataSource(load=squares, config=SquaresOptions, license="CC0-1.0")}

    Collects, as ``engine_train_engines``. Entry-point group ``engine.data_sources``.
    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_commands() -> Mapping[str, Command]:
    """Offer commands of the command line: ``engine NAME``.

    :returns: ``Command`` by name; its function is a Typer command. ``"group.name"`` is a command of a group.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.commands``; only the plugin of the command that is
    used is imported; ``engine --help`` imports all of them.
    Called in the process of the command line. Not collective.
    """


@hookspec
def engine_parts() -> Mapping[str, Part]:
    """Offer parts of a run that plugins provide: worker pools of rewards, episodes, samplers in another process.

    :returns: ``Part`` by name; ``engine_core.contracts.parts`` lists the names and what each must implement.

    Collects, as ``engine_train_engines``. Entry-point group ``engine.parts``.
    Called once in every process that needs the part. Not collective.
    """


# -------------------------------------------------------------------------
# Observers, and the options of plugins in ``plugins = [...]``
# -------------------------------------------------------------------------


@hookspec
def engine_options() -> type[Options]:
    """Return the option model of this plugin's step hooks and observer: the keys of ``[plugin.NAME]``.

    NAME is the entry in ``plugins = [...]``, of a file its name without ``.py``.

    :returns: a class derived from ``engine_core.specs.Options``; hooks receive an instance as ``plugin_options``::

            @hookimpl
            def engine_options():
                return NotesOptions

    Default: no table. Plugins that are used only by the names of their tables have none.

    Called once in every process that loads plugins, before any model is built. Not collective.
    """


@hookspec
def engine_on_event(event: str, step: int, data: Mapping[str, Any], plugin_options: Any) -> str | None:
    """Receive an event of the run (a callback): for dashboards, alerts, early stopping.

    :param event: the name of the event, from the list below.
    :param step: the trainer's step, counted from 1; 0 before the first; of ``checkpoint_saved`` the last finished one.
    :param data: the values of the event, from the list below.
    :param plugin_options: the plugin's own table ``[plugin.NAME]``, see ``engine_options``.
    :returns: None, or from ``step_finished`` the reason (text) to end the run: it is logged, and the run ends after this
        step with a checkpoint and exit code 0. A text for another event is ignored, any other value is a failure.

    Events in their order, with their data. A trainer that samples nothing has no ``weights_synced`` and ``rollouts_finished``:

    - ``weights_synced``: ``version`` and ``bytes``. The event also comes before the first step, as of step 0.
    - ``run_started``: ``steps``, their number, and ``earlier``, the lines of ``metrics.jsonl`` before a resume, each with its
      ``step`` (a line of step 0 is the evaluation of ``eval.at_start``).
    - ``rollouts_finished``: ``rollouts``, a list of scored ``Rollout``.
    - ``evaluated``, if it is time: ``metrics``, from name to number.
    - ``step_finished``: ``metrics``, with those of an evaluation after the step (``eval/...``).
    - ``checkpoint_saved``, if it is time: ``path``.
    - ``run_finished``: ``metrics``; ``run_failed``: ``error`` (text); ``run_stopped``, by a signal: ``signal`` (text).

    Collects: every observer is called. An exception is logged and counted (``plugins/observer_failures``); training continues.

    Called in the controller, between the parts of a step. Not collective.
    """
