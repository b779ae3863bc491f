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
        Curriculum,
        DataSource,
        Environment,
        Loss,
        Objective,
        Options,
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

    :param role: ``actor``, ``ref``, ``critic``, ``reward_model`` (trained, or used by a reward), ``judge`` or ``rollout``. The last one is for
        a sampler with separate weights and the capability ``custom_model``, in whatever process it runs.
    :param model_config: the ``[model]`` table, or its equivalent for a model of a reward. ``model_config.path`` is the role's folder, in the
        layout of ``save_pretrained``, and ``model_config.override`` has the changes to that folder's config.
    :param options: the options of the role's backend, such as ``[actor.torch]``.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: a module with its weights loaded. Its ``forward`` takes ``input_ids`` and ``position_ids`` of shape [1, T].

    What ``forward`` returns depends on the role:

    - ``critic`` and ``reward_model``: values [1, T], or an object with ``values``. Compute each value from its own token and those before it.
      The engine moves a critic's values to the next token: its output ``values[t]`` is the value before token t is sampled.
      A transformers model with a head ``score`` (hidden size to 1) also works.
    - All others: logits [1, T, V], or an object with ``logits``. A ``PreTrainedModel`` may also name ``use_cache``, ``past_key_values`` and ``attention_mask``.
      For ``rollout``, build the actor's module; the first update replaces its weights.

    Stops at the first answer. Default: ``AutoModelForCausalLM`` from ``[model]``. A ``critic`` or
    ``reward_model`` has its decoder with a new or loaded head.

    Called once for each role, in the worker, on every rank, before anything is wrapped or sharded. For ``rollout`` it is
    called in the sampler's process, unless the sampler uses the actor's module. Not collective.
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

    This example removes a prefix and leaves out a value head::

        @hookimpl
        def engine_map_weights(weights):
            return ((name.removeprefix("policy."), w) for name, w in weights if name != "value.weight")

    :param sampler: the sampler's backend, ``rollout.backend``.
    :param weights: pairs of a name, as ``save_pretrained`` writes it, and a full (unsharded) tensor. Tensors are gathered as you iterate, so
        a generator keeps few in memory and a list the whole model. Do not change tensors in place: some belong to the actor.
    :param model_config: the ``[model]`` table.
    :param options: the options of the sampler's backend, ``[rollout.NAME]``.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: the names and tensors for the sampler to load. If the names are right, return ``weights`` itself.

    Stops at the first answer. Default: the weights unchanged.

    Called in the actor's workers, on the ranks that send, for each update of a sampler with separate weights; not if the update is an
    adapter alone. Reading ``weights`` is collective: the engine reads what the hook left.
    """


@hookspec(firstresult=True)
def engine_register_model(
    sampler: str, model_config: ModelConfig, options: Any, plugin_options: Any
) -> Mapping[str, Any] | None:
    """Register the actor's architecture with the library of a sampler that builds its models itself.

    :param sampler: the sampler's backend, ``rollout.backend``.
    :param model_config: the ``[model]`` table.
    :param options: the options of the sampler's backend, ``[rollout.NAME]``.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: changes to the model's config for this sampler, such as ``{"architectures": ["MyModel"]}``. Return None if the library
        knows the model, or if ``engine_map_weights`` maps its weights to a model that the library knows.

    Stops at the first answer. Default: the library uses the architecture that the model's config names.

    Called once in the sampler's process, on every rank of its pool, before its library starts. Samplers that call
    ``engine_build_model`` do not call this hook. Not collective.
    """


@hookspec(firstresult=True)
def engine_wrap_policy(role: str, module: nn.Module, options: Any, plugin_options: Any) -> list[str] | None:
    """Name the submodules that are units of sharding, activation checkpointing and compilation.

    :param role: as in ``engine_build_model``.
    :param module: the role's module, not yet wrapped.
    :param options: the options of the role's backend.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: names as in ``module.named_modules()``. No unit may contain another.

    Stops at the first answer. Default: the decoder layers (the longest ``ModuleList``).

    Called once for each role, after ``engine_build_model``, on every rank. Not collective.
    """


@hookspec(firstresult=True)
def engine_shard_model(
    role: str, module: nn.Module, units: list[str], options: Any, plugin_options: Any
) -> nn.Module | None:
    """Shard the model over ranks, as FSDP does.

    Apply these in order: tensor-parallel plan, activation checkpointing, compilation, sharding.

    :param role: as in ``engine_build_model``.
    :param module: the role's module, not yet wrapped.
    :param units: the names that ``engine_wrap_policy`` returned.
    :param options: the options of the role's backend, such as ``[actor.fsdp]``.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: the module to train, either the same object or a wrapper around it.

    Stops at the first answer. Default: no sharding, and activation checkpointing if the backend's options ask for it.

    Called once for each role, on every rank. Collective: it may communicate.
    """


@hookspec(firstresult=True)
def engine_build_optimizer(
    role: str, module: nn.Module, optim_config: OptimConfig, options: Any, plugin_options: Any
) -> tuple[Optimizer, LRScheduler | None] | None:
    """Build the optimizer and the learning-rate schedule of one role.

    :param role: as in ``engine_build_model``, but only a trained role.
    :param module: the result of ``engine_shard_model``.
    :param optim_config: the role's optimizer table, such as ``[actor.optim]``. A schedule ends after ``decay_steps`` optimizer steps. If
        the run file has 0, the engine puts the run's length there, and leaves 0 only if that length is unknown.
    :param options: the options of the role's backend.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: ``(optimizer, lr_scheduler)``. They replace everything that ``optim_config`` sets, except ``max_grad_norm`` and
        ``max_skipped_steps``. The optimizer must hold every parameter that requires gradients. The highest rate of its groups is
        ``optim_config.lr``. After each optimizer step that was not skipped, the engine steps the scheduler once; None: constant rates.

    Stops at the first answer. Default: AdamW, with the schedule that ``optim_config`` names.

    Called once for each trained role (not for ``ref``), after ``engine_shard_model``, on every rank. Not collective.
    """


# -------------------------------------------------------------------------
# Table hooks: names for the TOML. All results are collected.
# -------------------------------------------------------------------------


@hookspec
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer train engines for ``[actor] backend = "NAME"``, with options in ``[actor.NAME]``.

    :returns: a ``TrainBackend`` for each name. Its ``load`` is a subclass of ``engine_core.contracts.engines.TrainEngine``,
        imported only in the workers that use it::

            @hookimpl
            def engine_train_engines():
                return {"mine": TrainBackend(load="my_plugin.engine:MyEngine", config=MyOptions)}

    Collects from all plugins. A name in a plugin's metadata must be in its table. Entry-point group ``engine.train_engines``.
    Called once in every process. Not collective.
    """


@hookspec
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer rollout engines for ``[rollout] backend = "NAME"``, with options in ``[rollout.NAME]``.

    :returns: a ``RolloutBackend`` for each name. Its ``load`` is a subclass of ``engine_core.contracts.engines.RolloutEngine``,
        imported only in the workers that use it.

    Collects from all plugins; entry-point group ``engine.rollout_engines``. Called once in every process. Not collective.
    """


@hookspec
def engine_rewards() -> Mapping[str, Reward]:
    """Offer rewards for ``[[reward]] name = "NAME"``, with options in ``[reward.NAME]``.

    A reward gets what its parameters name: ``completion`` of one sample or ``completions`` of many, columns, and options.

    :returns: a ``Reward`` for each name. Its ``load`` returns a float for each sample, or None where the reward does not apply.

    Collects from all plugins; entry-point group ``engine.rewards``. Called once in every process. Not collective.
    """


@hookspec
def engine_advantages() -> Mapping[str, Advantage]:
    """Offer advantage estimators for ``[algorithm] advantage = "NAME"``, with options in ``[algorithm.NAME]``.

    :returns: an ``Advantage`` for each name, which declares the columns that the estimator needs.

    Collects from all plugins; entry-point group ``engine.advantages``. Called once in every process. Not collective.
    """


@hookspec
def engine_losses() -> Mapping[str, Loss]:
    """Offer policy losses for ``[algorithm] loss = "NAME"``, with options in ``[algorithm.NAME]``.

    :returns: a ``Loss`` for each name, which declares the outputs and columns that the loss reads.

    Collects from all plugins; entry-point group ``engine.losses``. Called once in every process. Not collective.
    """


@hookspec
def engine_stages() -> Mapping[str, Stage]:
    """Offer stages between rewards and advantages for ``[[stage]] name = "NAME"``, with options in ``[stage.NAME]``.

    :returns: a ``Stage`` for each name. Its function gets the step's scored rollouts, the step and the stage's options. It returns the
        rollouts to train on (some, all, repeated, in any order) and numbers that are logged as ``stage/NAME/...``. A stage
        that keeps state between steps is a class, and checkpoints save its ``state``.

    Collects from all plugins; entry-point group ``engine.stages``. Called once in every process. Not collective.
    """


@hookspec
def engine_environments() -> Mapping[str, Environment]:
    """Offer multi-turn environments for ``[environment] name = "NAME"``, with options in ``[environment.NAME]``.

    An environment is an ``async def`` that gets an episode: the prompt and its row, the tokenizer, and the policy. It samples
    turns of the policy, appends observations, and returns the rollout.

    :returns: an ``Environment`` for each name.

    Collects from all plugins; entry-point group ``engine.environments``. Called once in every process. Not collective.
    """


@hookspec
def engine_trackers() -> Mapping[str, TrackerSpec]:
    """Offer trackers for ``[tracking] trackers = ["NAME"]``, with options in ``[tracking.NAME]``.

    :returns: a ``TrackerSpec`` for each name.

    Collects from all plugins; entry-point group ``engine.trackers``. Called once in every process. Not collective.
    """


@hookspec
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer training loops for ``trainer = "NAME"``, with options in ``[NAME]``.

    :returns: a ``TrainerSpec`` for each name, which declares the tables of the run file that the trainer reads.

    Collects from all plugins; entry-point group ``engine.trainers``. Called once in every process. Not collective.
    """


@hookspec
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer runtimes for ``[runtime] backend = "NAME"``, with options in ``[runtime.NAME]``.

    :returns: a ``RuntimeSpec`` for each name. Its ``check`` validates the options and ``[placement]`` from the run file alone.

    Collects from all plugins; entry-point group ``engine.runtimes``. Called once in every process. Not collective.
    """


@hookspec
def engine_weight_transports() -> Mapping[str, TransportSpec]:
    """Offer weight transports between processes for ``[rollout] transport = "NAME"``, with options in ``[rollout.NAME]``.

    :returns: a ``TransportSpec`` for each name, which declares the supported topologies. Its ``load`` is a subclass of
        ``engine_core.contracts.weight_transport.WeightTransport``. It is imported in the workers that use it, and in the
        controller if the run file names it.

    Collects from all plugins; entry-point group ``engine.weight_transports``. Called once in every process. Not collective.
    """


@hookspec
def engine_objectives() -> Mapping[str, Objective]:
    """Offer objectives, which train engines differentiate, for ``LossCall("NAME", {...})``.

    :returns: an ``Objective`` for each name. The worker calls its function with the outputs of the forward pass, the micro-batch and
        the parameters of the ``LossCall``::

            def squared(outputs, batch, scale):
                losses = scale * outputs["log_probs"] ** 2  # [T]
                mean = (batch["token_share"] * losses.detach()).sum()
                return (batch["weights"] * losses).sum(), {"mean": mean}


            @hookimpl
            def engine_objectives():
                return {"squared": Objective(load=squared)}

    Collects from all plugins; entry-point group ``engine.objectives``. Called once in every process. Not collective.
    """


@hookspec
def engine_columns() -> Mapping[str, Column]:
    """Offer columns that estimators and losses may need, with the role or function that computes them.

    :returns: a ``Column`` for each name, which is an output of a role's ``infer`` or a function of columns that exist already::

            def surprise(batch):
                return -batch["old_log_probs"]  # [T]


            @hookimpl
            def engine_columns():
                return {"surprise": Column(load=surprise, needs=frozenset({"old_log_probs"}))}

    Collects from all plugins; entry-point group ``engine.columns``. Called once in every process. Not collective.
    """


@hookspec
def engine_data_sources() -> Mapping[str, DataSource]:
    """Offer data sources for ``[data] source = "NAME"``, with options in ``[data.NAME]``.

    :returns: a ``DataSource`` for each name. Its function returns the rows of a split::

            def squares(split, count):
                first = 0 if split == "train" else count
                return [{"prompt": f"{i}*{i}=", "answer": str(i * i)} for i in range(first, first + count)]


            @hookimpl
            def engine_data_sources():
                return {"squares": DataSource(load=squares, config=SquaresOptions, license="CC0-1.0")}

    A run reads all rows at its start, to check and hash them. It skips that for a sequence with a text ``digest``, the
    hash of its rows.

    Collects from all plugins; entry-point group ``engine.data_sources``. Called once in every process. Not collective.
    """


@hookspec
def engine_curricula() -> Mapping[str, Curriculum]:
    """Offer curricula for ``[data] curriculum = "NAME"``, with options in ``[data.NAME]``.

    :returns: a ``Curriculum`` for each name. Its function chooses the rows of a round; one that learns from rewards is a class.

    Collects from all plugins; entry-point group ``engine.curricula``. Called once in every process. Not collective.
    """


@hookspec
def engine_commands() -> Mapping[str, Command]:
    """Offer commands of the command line: ``engine NAME``.

    :returns: a ``Command`` for each name. Its function is a Typer command. ``"group.name"`` is a command of a group.

    Collects from the plugin of the command in use, or for ``engine --help`` from all; entry-point group ``engine.commands``.
    Called in the process of the command line. Not collective.
    """


@hookspec
def engine_parts() -> Mapping[str, Part]:
    """Offer parts of a run that plugins provide: worker pools of rewards, episodes, samplers in another process.

    :returns: a ``Part`` for each name. ``engine_core.contracts.parts`` lists the names and what each must implement.

    Collects from all plugins; entry-point group ``engine.parts``.
    Called once in every process that needs the part. Not collective.
    """


# -------------------------------------------------------------------------
# Observers, and the options of plugins in ``plugins = [...]``
# -------------------------------------------------------------------------


@hookspec
def engine_options() -> type[Options]:
    """Return the option model of this plugin's step hooks and observer: the keys of ``[plugin.NAME]``.

    NAME is the plugin's entry in ``plugins = [...]``. For a file, NAME is the file's name without ``.py``.

    :returns: a class derived from ``engine_core.specs.Options``. Hooks receive an instance of it as ``plugin_options``::

            @hookimpl
            def engine_options():
                return NotesOptions

    Default: no table. A plugin that only offers names in tables has none.

    Called once in every process that loads plugins, before models are built. Not collective.
    """


@hookspec
def engine_on_event(event: str, step: int, data: Mapping[str, Any], plugin_options: Any) -> str | None:
    """Receive an event of the run (a callback): for dashboards, alerts, early stopping.

    :param event: the name of the event, from the list below.
    :param step: the trainer's step, counted from 1; 0 before the first step. For ``checkpoint_saved`` and ``checkpoint_failed``, the last finished step.
    :param data: the values of the event, from the list below.
    :param plugin_options: the plugin's options, ``[plugin.NAME]``, see ``engine_options``.
    :returns: None to continue. To end the run, return the reason as text from ``step_finished``: the text is logged, and the run ends
        after this step with a checkpoint and exit code 0; ``eval.at_end`` does not evaluate then, because the step is recorded.
        Text for another event is ignored. Any other value is a failure.

    Events come in this order, with this data:

    - ``weights_synced``: ``version`` and ``bytes``. The first one comes before the first step, as of step 0.
    - ``run_started``: ``folder`` is the path of the run, ``steps`` the number of steps. ``earlier`` has the lines of ``metrics.jsonl`` before a resume, each with its
      ``step``. A line of step 0 is the evaluation of ``eval.at_start``.
    - ``rollouts_finished``: ``rollouts``, a list of scored ``Rollout``. ``advantages_computed``: ``advantages`` [N] of the learned tokens.
    - ``evaluated``, after an evaluation: ``metrics``, a number for each name.
    - ``step_finished``: ``metrics``. They include those of an evaluation after the step (``eval/...``).
    - ``condition_found``, the first time that a condition of the run's health holds: ``name``, ``message``. ``checkpoint_saved``: ``path``.
      ``checkpoint_failed``, of a save after which the run continues: ``failures``, how many failed in a row.
    - ``run_finished``: ``metrics``; or ``run_failed``: ``error`` (text); or ``run_stopped``, by a signal: ``signal`` (text).

    A trainer that samples nothing has no ``weights_synced`` and no ``rollouts_finished``.

    Collects: every observer is called. A failure is logged and counted in ``plugins/observer_failures`` of the next step; the run continues.

    Called in the controller, between the parts of a step. Not collective.
    """
