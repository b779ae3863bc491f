"""What a table hook returns for each name: cheap to import, resolved where it is used.

``load`` is ``"module:attribute"`` (imported on first use, in the worker) or the object itself.
``config`` is the pydantic model of the option table that stands beside the name in the TOML:
``backend = "torch"`` with ``[actor.torch]``, ``name = "format"`` with ``[reward.format]``,
``loss = "ppo_clip"`` with ``[algorithm.ppo_clip]``. The rule is the same everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine_core.tables import BASE_SAMPLING


class Options(BaseModel):
    """Base of every option table: unknown keys are refused, every field has a docstring below it.

    Attributes:
        chooses: keys of the table that choose something by name, and the kind of these names, of the core or of a
            plugin (``{"loss": "pair_losses"}``). The schema of run files lists the names; the plugins behind those that
            a trainer's table chooses are loaded with the run.
        renamed: old names of keys of this table, each with its new name; a run file with an old name is refused
            with an error that names the new one.
    """

    chooses: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @property
    def updates_weights_in_flight(self) -> bool:
        """Of a trainer's table: weights may change while responses are being sampled, which go on with the new ones."""
        return False


class NoOptions(Options):
    """For a name that takes no options."""


class RefillOptions(Options):
    """Base of the option table of a stage that drops groups for the trainer to replace by others.

    The stage runs on each round's new rollouts; its function does not receive these options. Stages
    after it see the rollouts of all rounds at once.
    """

    max_rounds: int = Field(10, gt=0)
    """Rounds of sampling in one step, the first included; after the last the step goes on with the groups that it has."""
    oversample: float = Field(1.0, ge=1)
    """A round samples this many times the prompts that are missing; what is then too much is dropped."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One entry of a table hook."""

    kind: ClassVar[str] = ""  # the table: "train_engines", "rewards", ...
    noun: ClassVar[str] = ""  # for messages: "train engine", "reward", ...
    given: ClassVar[tuple[str, ...]] = ()  # what a function of this kind is called with, before its options
    makes_objects: ClassVar[bool] = False  # a class may stand for the function: see ``Stage``
    internal: ClassVar[bool] = False  # code asks for a name of this kind, never a key of a run file

    load: str | Callable[..., Any]
    config: type[BaseModel] = NoOptions
    health: str | Callable[[], str] | None = None
    """Asked by ``engine doctor``: a line about this machine, or an ``EngineError`` that says what it lacks."""

    def resolve(self) -> Any:
        """The class or function behind ``load``."""
        return resolve(self.load)


def resolve(load: str | Callable[..., Any]) -> Any:
    """What ``"module:attribute"`` names, or the object itself."""
    if not isinstance(load, str):
        return load
    module, _, attribute = load.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class TrainBackend(Spec):
    """A train engine: ``load`` is a subclass of ``engine_core.contracts.engines.TrainEngine``.

    Each capability must be implemented by the class (a method that is not the base's):
    see ``engine_core.plugins.modules.TRAIN_CAPABILITIES``.

    Args:
        frozen_only: it runs models that are never trained, a teacher and those of rewards, at temperature 1; no other role may
            name it.
        remote: the model is held by somebody else: of its folder only config and tokenizer are read here.
        own_model: ``_build_model_optimizer`` builds another model than that of ``[model]``. A sampler with weights of its own then
            needs a hook of the plugin: ``engine_build_model`` or ``engine_map_weights``.
        check_checkpoint: ``f(folder, was, now) -> str``: what keeps this engine (named ``now``) from reading a role's
            checkpoint in the common format that the engine ``was`` wrote; empty where nothing does. None: nothing ever does.
    """

    kind = "train_engines"
    noun = "train engine"
    capabilities: frozenset[str] = frozenset()
    frozen_only: bool = False
    remote: bool = False
    own_model: bool = False
    check_checkpoint: str | Callable[..., str] | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutBackend(Spec):
    """A rollout engine: ``load`` is a subclass of ``engine_core.contracts.engines.RolloutEngine``.

    For capabilities see ``engine_core.plugins.modules.ROLLOUT_CAPABILITIES``. Its option model may have a property ``other_policy``:
    the keys by which it samples from another policy than the weights that it is given (fewer bits), empty where
    there are none. Tokens are then always weighed; a run that switches this off is refused. And a field ``adapter``: true
    where the engine has the base and ``update_weights`` takes ``contracts.weight_sync.stream_of`` an adapter alone. And a field
    ``max_model_len``: tokens of a prompt and its response together that the engine is told to hold; a run with longer ones is refused.

    Args:
        sampling: sampling options that it implements (``engine_core.tables.SamplingOptions``); a run that sets another is refused.
        frozen_only: its weights cannot be replaced: it samples for a judge alone.
    """

    kind = "rollout_engines"
    noun = "rollout engine"
    capabilities: frozenset[str] = frozenset()
    sampling: frozenset[str] = BASE_SAMPLING
    frozen_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Reward(Spec):
    """A reward function; it receives the arguments that it names (see ``engine_core.rewards``).

    Options of ``config`` reach the function as keyword arguments of the same names.

    Args:
        factory: ``load`` is no reward but makes one: it is called once in each worker with the
            options, and with ``root`` (folder of the run file), ``allow_code``, ``timeout`` (seconds that a call may
            take) and ``modules`` (`plugins` of the run file) if it names them.
        answers: the function gives ``{"score": number, "pred": text}``, where equal texts are the same
            answer: a majority vote (`eval.majority`) can be held on them.
        workers: default of `workers`. ``cores`` is for a function that keeps a core busy, has no state, and takes
            little memory: each worker has its own copy.
        on_timeout: default of `on_timeout`: ``zero`` where the time depends on the response alone, so that a hang is no way around
            a bad reward.
        check: called with what a factory is called with, by ``engine validate`` and when a run starts, before any
            model is built; it raises an ``EngineError`` that says what this machine or the options lack. It gives None, or a function
            ``f(columns)`` that is asked about rows: it raises a LookupError where a row lacks what the reward reads, and
            a ValueError where that is of no use. Both end a sentence that begins with the row and the reward.
    """

    kind = "rewards"
    noun = "reward"
    factory: bool = False
    answers: bool = False
    workers: Literal["one", "cores"] = "one"
    on_timeout: Literal["drop", "zero"] = "drop"
    check: str | Callable[..., Callable[[Mapping[str, Any]], None] | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Advantage(Spec):
    """An advantage estimator ``f(batch, **options) -> [T] float32``, or a mapping of such columns.

    Args:
        needs: columns that must be in the batch; the core schedules who makes them
            (``ref_log_probs``, ``old_log_probs``, ``greedy_rewards``, ...) and refuses what nobody can
            make. Without ``rewards`` a KL in the reward is refused: it would have no effect.
        makes: the columns it gives; more than ``advantages`` come as a mapping.
        min_group_size: fewest responses to a prompt with which it gives anything but 0: 2 where it compares the responses of
            a group. A run with fewer (`rollout.group_size`) would learn nothing and is refused.
    """

    kind = "advantages"
    noun = "advantage estimator"
    given = ("batch",)
    needs: frozenset[str] = frozenset({"rewards", "group_ids"})
    makes: frozenset[str] = frozenset({"advantages"})
    min_group_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Loss(Spec):
    """A policy loss ``f(outputs, batch, **options) -> (per-token loss [T], metrics)``.

    Args:
        outputs: what the train engine computes with gradient: ``log_probs``, ``entropy``,
            ``sum_pi_squared``.
        needs: columns read from the batch. Besides those of an advantage: ``current_log_probs`` and
            ``current_entropy``, of the policy as the update of a mini-batch finds it.
        prepare: ``f(batch, seed, **options) -> {column: [T]}``, called with each whole mini-batch before
            its update: what is a statistic over the mini-batch (a rank, a quantile) is made here and read
            by the loss as a column, so that the loss does not depend on how the mini-batch is split.
        aggregation: what `algorithm.loss_aggregation = "auto"` is with this loss.
        ratio: the loss weighs each token by the ratio to ``old_log_probs`` itself. Where it does not,
            the correction does, also with `algorithm.correction.bypass`.
    """

    kind = "losses"
    noun = "policy loss"
    given = ("outputs", "batch")
    outputs: tuple[str, ...] = ("log_probs",)
    needs: frozenset[str] = frozenset({"advantages"})
    prepare: str | Callable[..., Any] | None = None
    aggregation: str = "token-mean"
    ratio: bool = True

    def resolve_prepare(self) -> Callable[..., Any] | None:
        """The function behind ``prepare``."""
        return None if self.prepare is None else resolve(self.prepare)


@dataclass(frozen=True, kw_only=True)
class PairLoss(Spec):
    """A loss of pairs of responses, ``f(chosen, rejected, beta=..., **keys) -> [P]``, for trainer ``dpo``.

    ``chosen`` and ``rejected`` [P] are the scores of the two responses, with gradient: log-ratios to the
    reference (log-probs without one), as sums over tokens or their means.

    Args:
        reference: it compares with a reference model.
        divergence: `dpo.f_divergence` may be chosen.
        normalized: scores are means over tokens, unless `dpo.length_normalize` says otherwise.
        may_normalize: that key may say otherwise.
        sft_coef: what `dpo.sft_coef` is unless set.
        reads: other keys of ``[dpo]`` that the function receives: ``label_smoothing``, ``simpo_gamma``,
            ``discopop_tau``. It has no option table of its own.
        statistic: a column over the mini-batch that it needs, see ``preference_columns``: with ``order`` and
            ``mean`` the function also receives ``shift`` [P], with ``matching`` pairs are formed anew by rank.
    """

    kind = "pair_losses"
    noun = "pair loss"
    given = ("chosen", "rejected")
    reference: bool = True
    divergence: bool = True
    normalized: bool = False
    may_normalize: bool = True
    sft_coef: float = 0.0
    reads: frozenset[str] = frozenset()
    statistic: Literal["", "order", "matching", "mean"] = ""

    @property
    def keywords(self) -> frozenset[str]:
        """What the function receives by name."""
        shift = {"shift"} if self.statistic in ("order", "mean") else set()
        return frozenset({"beta", *self.reads, *shift})


@dataclass(frozen=True, kw_only=True)
class Stage(Spec):
    """A step between rewards and advantages: ``f(rollouts, step, **options) -> (rollouts, metrics)``.

    It may drop rollouts, reorder and repeat them. Where ``config`` is a ``RefillOptions``, groups that
    it drops are replaced: further prompts are sampled and scored until the step has all its groups.

    A stage that keeps something from step to step is a class: made once for a run with its options, then
    called with ``(rollouts, step)``. Its ``state() -> StageState`` goes into every checkpoint, and a resumed
    run gives it back by ``load_state(state)`` before the next call.

    Args:
        off_policy: it brings in rollouts of older policies. `algorithm.correction.level = "auto"` then
            weighs tokens, and the stage must stand after those that refill.
    """

    kind = "stages"
    noun = "stage"
    given = ("rollouts", "step")
    makes_objects = True
    off_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment(Spec):
    """An environment ``async def f(episode, **options) -> Rollout``; see docs/environments.md.

    Or a class, made once a run with the options as keyword arguments, whose instances have ``async def
    __call__(self, episode)``; where it has ``close``, that is called at the end of the run.

    Args:
        rewards: names of the rewards that its episodes set themselves; each joins the weighted sum.
        needs: columns of the data that it reads; a run whose data lacks one is refused.
        tools: JSON schemas of its tools, which the chat template shows in prompts; a row may have its own.
    """

    kind = "environments"
    noun = "environment"
    given = ("episode",)
    rewards: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(Spec):
    """A tracker: ``load`` is a subclass of ``engine_core.runs.tracking.Tracker``."""

    kind = "trackers"
    noun = "tracker"


SHARED_SECTIONS = frozenset(
    {
        "trainer",
        "plugins",
        "model",
        "actor",
        "data",
        "run",
        "checkpoint",
        "tracking",
        "runtime",
        "placement",
        "schedule",
        "eval",
    }
)
"""Sections of a run file that every trainer reads, for ``TrainerSpec.sections``."""

SAMPLING_SECTIONS = frozenset({"rollout", "reward", "environment", "stage"})
"""Sections that a trainer reads besides them where it samples."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Spec):
    """A training loop: ``load`` is a class with ``train()``.

    Args:
        sections: top-level TOML tables that it reads (none: all of them); another one that is
            present is named at the start as not read.
        required: those of them that must be present.
        for_eval: those whose backends are needed only where ``[eval]`` asks for scores.
        stored: `data.train` names files of rollouts, not rows.
        concurrent: it samples while it trains: what a sampler needs of the actor it is given beforehand.
    """

    kind = "trainers"
    noun = "trainer"
    sections: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    for_eval: frozenset[str] = frozenset()
    stored: bool = False
    concurrent: bool = False


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec(Spec):
    """A runtime: ``load`` is a subclass of ``engine_core.contracts.runtime.Runtime``.

    Args:
        in_process: every role is in the controller's process; ``[placement]`` is not read.
        check: called with the config by ``engine validate`` and when a run starts, before anything of the run is
            there: what its own options ask for that ``[placement]`` has not, or that can never be. Gives one text
            a problem, beginning with the key; imports nothing heavy and looks at no cluster.
    """

    kind = "runtimes"
    noun = "runtime"
    in_process: bool = False
    check: str | Callable[[Any], Iterable[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class TransportSpec(Spec):
    """A weight transport: ``load`` is a subclass of ``engine_core.contracts.weight_transport.WeightTransport``.

    Args:
        serves: the topologies in which it works: ``colocated`` (the sampler is in the processes of the actor), ``disaggregated`` (it is
            in processes of another pool). One that serves only ``colocated`` is never loaded: nothing crosses between processes.
    """

    kind = "weight_transports"
    noun = "weight transport"
    serves: frozenset[str] = frozenset({"disaggregated"})


@dataclass(frozen=True, kw_only=True)
class Objective(Spec):
    """What a train engine differentiates: ``f(outputs, batch, **parameters) -> (sum, metrics)``.

    ``sum`` is a scalar with gradient: the sum of ``batch["weights"]`` [T] times the loss of each token, so that it does
    not depend on how a mini-batch is split. ``metrics`` are scalars, reduced over micro-batches and ranks as their
    names declare (``engine_core.metrics``). A trainer calls it by name: ``LossCall("NAME", {...})``; ``parameters`` are plain values.

    Args:
        factory: ``load`` makes the objective: ``make(plugins, **parameters) -> f(outputs, batch)``, with the worker's own
            plugins to look up functions by name. It is called once for each mini-batch.
    """

    kind = "objectives"
    noun = "objective"
    internal = True
    given = ("outputs", "batch")
    factory: bool = False


@dataclass(frozen=True, kw_only=True)
class Column(Spec):
    """A column that is computed after the rollouts, for estimators and losses that need it.

    Either a role's ``infer`` gives it (``role`` and ``output``), or ``load`` is a function
    ``f(batch) -> [T] or [B] float32`` of columns that are there already (``needs``).

    Args:
        role: whose ``infer`` gives it: ``actor``, ``ref``, ``teacher``, ``critic``; empty: ``load`` computes it.
        output: the output of ``infer`` that it is: ``log_probs``, ``entropy``, ``sum_pi_squared``; of the critic ``values``,
            ``scores``, for an estimator that needs ``values`` and makes ``returns``.
        needs: columns that ``load`` reads.
    """

    kind = "columns"
    noun = "column"
    internal = True
    given = ("batch",)
    load: str | Callable[..., Any] = ""
    role: str = ""
    output: str = ""
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DataSource(Spec):
    """A source of rows: ``f(split, **options) -> sequence of dicts``, for ``[data] source = "NAME"``.

    A preset of a public data set is one. Rows are prepared as rows of files are: layout, chat template, limits.

    Args:
        license: of the data, an SPDX identifier or a sentence; logged once at the start.
        revision: of the data that the source was made for.
        url: where the data comes from.
    """

    kind = "data_sources"
    noun = "data source"
    given = ("split",)
    license: str = ""
    revision: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Command(Spec):
    """A command of ``engine``: ``load`` is a function whose signature Typer reads and whose docstring is the help.

    The name is the command's; ``"bench.step"`` is the command ``step`` of the group ``bench``.

    Args:
        group_help: one line about the group, for the help.
    """

    kind = "commands"
    noun = "command"
    internal = True
    group_help: str = ""


@dataclass(frozen=True, kw_only=True)
class Part(Spec):
    """A part of a run that the core calls by name and does not contain; ``load`` implements the protocol of its name.

    ``engine_core.contracts.parts`` lists the names and their protocols.
    """

    kind = "parts"
    noun = "part"
    internal = True


TABLE_SPECS: Mapping[str, type[Spec]] = {
    spec.kind: spec
    for spec in (
        TrainBackend,
        RolloutBackend,
        Reward,
        Advantage,
        Loss,
        PairLoss,
        Stage,
        Environment,
        TrackerSpec,
        TrainerSpec,
        RuntimeSpec,
        TransportSpec,
        Objective,
        Column,
        DataSource,
        Command,
        Part,
    )
}
"""Every table hook by its kind: hook ``engine_<kind>``, entry-point group ``engine.<kind>``."""
