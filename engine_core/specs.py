"""Specs: the entries that table hooks return by name. They are cheap to import and resolved on use.

``load`` is ``"module:attribute"`` (imported on first use, in the worker) or the object itself. ``config`` is the pydantic
model of the option table of the name in the TOML: ``backend = "torch"`` has ``[actor.torch]``, ``name = "format"`` has
``[reward.format]``, ``loss = "ppo_clip"`` has ``[algorithm.ppo_clip]``. The rule is the same for all tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from engine_core.tables import BASE_SAMPLING


class InputFile(str):
    """The value of an option of the type ``FilePath``."""


def _absolute(path: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get("folder")
    return path if folder is None else str((Path(folder) / path).resolve())


OutputPath = Annotated[str, AfterValidator(_absolute)]
"""An option that names a file or folder, relative to the run file's folder. It is made absolute when the run file is
read, so that a run that is resumed or exported finds it."""
FilePath = Annotated[OutputPath, AfterValidator(InputFile)]
"""An ``OutputPath`` at which something must be: ``engine validate`` and a run refuse an absent one."""


class Options(BaseModel):
    """The base class of option tables: unknown keys are refused, each field has a docstring below it.

    Attributes:
        chooses: keys whose value is a name of a table hook, each with the kind of that hook
            (``{"loss": "pair_losses"}``). The schema of run files lists the names. The plugins of the names that a
            trainer's table chooses are loaded with the run.
    """

    chooses: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @property
    def updates_weights_in_flight(self) -> bool:
        """Whether a trainer updates weights during sampling; responses then continue with the new weights."""
        return False


class NoOptions(Options):
    """The empty option table of a name that has no options."""


class RefillOptions(Options):
    """The base option table of a stage that drops groups, which the trainer replaces.

    The stage runs on each round's new rollouts, without these options. Later stages receive those of all rounds at once.
    """

    max_rounds: int = Field(10, gt=0)
    """Maximum number of sampling rounds in one step. After the last round the step continues with the groups that it has."""
    oversample: float = Field(1.0, ge=1)
    """Each round samples the number of missing prompts times this factor. Surplus groups are dropped."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One entry of a table hook."""

    kind: ClassVar[str] = ""  #: the table: "train_engines", "rewards", ...
    noun: ClassVar[str] = ""  #: for messages: "train engine", "reward", ...
    given: ClassVar[tuple[str, ...]] = ()  #: positional arguments of a function of this kind
    methods: ClassVar[tuple[str, ...]] = ()  #: of a class that may replace the function: see ``Stage``
    internal: ClassVar[bool] = False  #: names of this kind are used by code, never by a key of a run file

    load: str | Callable[..., Any]  #: the object, or its address ``module:name``, imported when it is used
    config: type[BaseModel] = NoOptions  #: option model: the keys of the name's table
    health: str | Callable[[], str] | None = None
    """Called by ``engine doctor``: returns a line about this machine, or raises an ``EngineError``: what it lacks."""

    def resolve(self) -> Any:
        """The class or function behind ``load``."""
        return resolve(self.load)


def resolve(load: object) -> Any:
    """Import and return the object that ``"module:attribute"`` names; return any other object unchanged."""
    if not isinstance(load, str):
        return load
    module, _, attribute = load.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """The base of specs of engines. The class must override the base's method of each of its capabilities.

    Args:
        families: what is known of models by ``model_type`` of their config: an empty text if the engine was tested with
            one, else what differs or fails. It may be the address of that mapping. ``engine validate`` prints it.
    """

    capabilities: frozenset[str] = frozenset()  #: the hook reference has their methods
    families: str | Mapping[str, str] = ""


@dataclass(frozen=True, kw_only=True)
class TrainBackend(EngineSpec):
    """A train engine: ``load`` is a subclass of ``engine_core.contracts.engines.TrainEngine``.

    Args:
        frozen_only: the engine runs only models that are never trained (a teacher, models of rewards), at
            temperature 1; other roles may not use it.
        remote: a server holds the model; only config and tokenizer are read from the model's folder.
        own_model: ``_build_model_optimizer`` builds a model other than that of ``[model]``. A sampler with separate
            weights then needs a hook of the plugin: ``engine_build_model`` or ``engine_map_weights``.
        check_checkpoint: ``f(folder, was, now) -> str``: the reason why this engine (named ``now``) cannot read the
            common-format checkpoint of a role that the engine ``was`` wrote; empty if it can. None: it always can.
        check_role: ``f(role, table) -> problems`` of the table of a role, such as an absent package; imports no torch.
    """

    kind = "train_engines"
    noun = "train engine"
    frozen_only: bool = False
    remote: bool = False
    own_model: bool = False
    check_checkpoint: str | Callable[..., str] | None = None
    check_role: str | Callable[..., Iterable[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutBackend(EngineSpec):
    """A rollout engine: ``load`` is a subclass of ``engine_core.contracts.engines.RolloutEngine``.

    The option model may have:

    * a property ``other_policy``: the option keys in use that make the sampler's policy differ from the received weights,
      such as quantization. If it is not empty, importance weights are required: a run that disables them is refused.
    * a field ``adapter``: True if ``update_weights`` takes ``contracts.weight_sync.stream_of`` an adapter alone.
    * a field ``max_model_len``: the maximum tokens of a prompt with its response; a run with longer ones is refused.

    Args:
        sampling: the supported ``engine_core.tables.SamplingOptions``; a run that sets another one is refused.
    """

    kind = "rollout_engines"
    noun = "rollout engine"
    sampling: frozenset[str] = BASE_SAMPLING


@dataclass(frozen=True, kw_only=True)
class Reward(Spec):
    """A reward function; it receives the arguments that it names (see ``engine_core.rewards``).

    Options of ``config`` are passed to the function as keyword arguments of the same names.

    Args:
        factory: ``load`` is a function that makes the reward function. It is called once in each worker with the
            options, and with ``root`` (folder of the run file, in a resumed run of its resolved copy), ``allow_code``, ``timeout``
            (seconds that a call may take) and ``modules`` (`plugins` of the run file) if it names them.
        answers: the function returns ``{"score": number, "pred": text}``; equal texts are the same
            answer, so a majority vote (`eval.majority`) can use them.
        workers: default of `workers`. ``cores`` is for a CPU-bound function without state that takes
            little memory: each worker has a copy.
        on_timeout: default of `on_timeout`; ``zero`` if the time depends on the response alone: no hang avoids a bad reward.
        check: called with a factory's arguments, by ``engine validate`` and at the start of a run, before any model is
            built. It raises an ``EngineError`` that says what this machine or the options lack. It returns None or
            ``f(columns)``, which checks a row: a LookupError if the row lacks what the reward reads, a ValueError if
            that value is unusable. Both messages end a sentence that begins with the row and the reward.
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
        needs: columns that must be in the batch; the core has them computed (``ref_log_probs``,
            ``old_log_probs``, ``greedy_rewards``, ...) and refuses a run that cannot. A set replaces the default, so
            name ``rewards`` too if they are read: without them a KL in the reward is refused.
        makes: the columns that it returns; as a mapping if there are others than ``advantages``.
        min_group_size: the smallest group size with advantages other than 0; 2 if the estimator compares the
            responses of a group. A run with a smaller `rollout.group_size` would learn nothing and is refused.
        per_group: whether a rollout's advantages depend on its own group alone, as `rollout.stream_update` needs.
    """

    kind = "advantages"
    noun = "advantage estimator"
    given = ("batch",)
    needs: frozenset[str] = frozenset({"rewards", "group_ids"})
    makes: frozenset[str] = frozenset({"advantages"})
    min_group_size: int = 1
    per_group: bool = False


@dataclass(frozen=True, kw_only=True)
class Loss(Spec):
    """A policy loss ``f(outputs, batch, **options) -> (per-token loss [T], metrics)``.

    Args:
        outputs: what the train engine computes with gradient: ``log_probs``, ``entropy``,
            ``sum_pi_squared``.
        needs: columns read from the batch. In addition to those of an advantage: ``current_log_probs`` and
            ``current_entropy``, of the policy just before the update of a mini-batch.
        aggregation: the value of `algorithm.loss_aggregation = "auto"` with this loss.
        ratio: whether the loss multiplies by ``p / p_old``. With `algorithm.correction.bypass` that ratio corrects for
            the sampler; a loss without one is weighed by the correction.
    """

    kind = "losses"
    noun = "policy loss"
    given = ("outputs", "batch")
    outputs: tuple[str, ...] = ("log_probs",)
    needs: frozenset[str] = frozenset({"advantages"})
    aggregation: str = "token-mean"
    ratio: bool = True


@dataclass(frozen=True, kw_only=True)
class Stage(Spec):
    """A step between rewards and advantages: ``f(rollouts, step, **options) -> (rollouts, metrics)``.

    A stage may drop, reorder and repeat rollouts. If ``config`` is a ``RefillOptions``, the groups that
    it drops are replaced: further prompts are sampled and scored until the step has all its groups.

    A stage with state is a class: it is created once per run with its options, then called with
    ``(rollouts, step)``. ``state() -> StageState`` is saved in every checkpoint, and a resumed
    run calls ``load_state(state)`` before the next step.

    If it enlarges batches, a property ``growth`` of its options, the factor, lets the learning-rate schedule end in time.

    Args:
        off_policy: the stage adds rollouts of older policies. `algorithm.correction.level = "auto"` then
            weighs tokens, and the stage must come after all stages that refill.
    """

    kind = "stages"
    noun = "stage"
    given = ("rollouts", "step")
    methods = ("state", "load_state")
    off_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment(Spec):
    """An environment ``async def f(episode, **options) -> Rollout``; the guide is "Multi-turn episodes and tools".

    It may be a class, created once per run with the options as keyword arguments, whose instances have ``async def
    __call__(self, episode)``. Its method ``close``, if any, is called at the end of the run.

    Args:
        rewards: names of the rewards that its episodes set; each is part of the weighted sum.
        needs: columns of the data that it reads; a run whose data lacks one is refused.
        tools: JSON schemas of its tools for the chat template, or a function of its options; a row may override them.
    """

    kind = "environments"
    noun = "environment"
    given = ("episode",)
    rewards: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    tools: tuple[Mapping[str, Any], ...] | Callable[[Any], tuple[Mapping[str, Any], ...]] = ()


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(Spec):
    """A tracker: ``load`` is a subclass of ``engine_core.runs.tracking.Tracker``."""

    kind = "trackers"
    noun = "tracker"


SHARED_SECTIONS = frozenset(
    {"trainer", "plugins", "plugin", "model", "actor", "data", "run", "checkpoint"}
    | {"tracking", "profile", "runtime", "placement", "schedule", "eval"}
)
"""The sections of a run file that every trainer reads, for ``TrainerSpec.sections``."""

SAMPLING_SECTIONS = frozenset({"rollout", "reward", "environment", "stage"})
"""The sections that a trainer that samples reads in addition to ``SHARED_SECTIONS``."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Spec):
    """A training loop: ``load`` is a subclass of ``TrainingRun`` or ``SampledRun`` with ``step``.

    Both are in ``engine_core.train``. The trainer reads its option table, ``[NAME]``, as ``self.config.options``.

    Args:
        sections: top-level TOML tables that it reads (empty: all); any other one is reported as not read at the start.
        required: the sections that must be present.
        for_eval: the sections whose backends are needed only if ``[eval]`` asks for scores.
        stored: `data.train` names files of rollouts, not rows.
        concurrent: the trainer samples while it trains; a sampler process keeps a copy of its weights for a restart.
    """

    kind = "trainers"
    noun = "trainer"
    sections: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    for_eval: frozenset[str] = frozenset()
    stored: bool = False
    concurrent: bool = False

    def sections_for(self, evaluates: object) -> frozenset[str]:
        """Return the sections whose backends a run needs that evaluates, or does not; empty: all."""
        return self.sections if evaluates else self.sections - self.for_eval


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec(Spec):
    """A runtime: ``load`` is a subclass of ``engine_core.contracts.runtime.Runtime``.

    Args:
        in_process: every role is in the controller's process; ``[placement]`` is not read.
        check: called with the config by ``engine validate`` and at the start of a run, before anything of the run
            exists. It returns one text per problem, beginning with the key: options that ``[placement]`` does not
            satisfy or that are impossible. It imports nothing heavy and contacts no cluster.
    """

    kind = "runtimes"
    noun = "runtime"
    in_process: bool = False
    check: str | Callable[[Any], Iterable[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class TransportSpec(Spec):
    """A weight transport: ``load`` is a subclass of ``engine_core.contracts.weight_transport.WeightTransport``.

    Args:
        serves: the supported topologies: ``colocated`` (sampler in the actor's processes), ``disaggregated`` (in
            processes of another pool). One with ``colocated`` alone is never loaded: no weights cross processes.
    """

    kind = "weight_transports"
    noun = "weight transport"
    serves: frozenset[str] = frozenset({"disaggregated"})


@dataclass(frozen=True, kw_only=True)
class Objective(Spec):
    """An objective that a train engine differentiates: ``f(outputs, batch, **parameters) -> (sum, metrics)``.

    ``sum`` is a scalar with gradient: the sum of ``batch["weights"]`` [T] times the loss of each token, so that it
    does not depend on the split of a mini-batch. ``metrics`` are scalars, reduced over micro-batches and ranks as
    ``engine_core.metrics`` says. A trainer names it, ``LossCall("NAME", {...})``; ``parameters`` are plain values.

    Args:
        factory: ``load`` makes the objective: ``make(plugins, **parameters) -> f(outputs, batch)``, where ``plugins``
            are the worker's, to look up functions by name. It is called once for each mini-batch.
    """

    kind = "objectives"
    noun = "objective"
    internal = True
    given = ("outputs", "batch")
    factory: bool = False


@dataclass(frozen=True, kw_only=True)
class Column(Spec):
    """A column that is computed after the rollouts, for estimators and losses that need it.

    Args:
        load: ``f(batch) -> [T] or [B] float32``, of columns that exist already (``needs``).
        role: the role of ``infer``: ``actor``, ``ref``, ``teacher``, ``critic``; empty: ``load`` computes the column.
        output: the output of ``infer``: ``log_probs``, ``entropy``, ``sum_pi_squared``; of the critic ``values``,
            ``scores``, for an estimator that needs ``values`` and makes ``returns``.
        needs: columns that ``load`` reads.
    """

    kind = "columns"
    noun = "column"
    internal = True
    given = ("batch",)
    load: str | Callable[..., Any] = ""  #: a function of the batch; empty if a role computes the column
    role: str = ""
    output: str = ""
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DataSource(Spec):
    """A source of rows: ``f(split, **options) -> sequence of dicts``, for ``[data] source = "NAME"``.

    Rows are prepared like rows of files: layout, chat template, limits.

    Args:
        license: the data's license, an SPDX identifier or a sentence; logged once at the start.
        revision: the revision of the data that the source was made for.
        url: the data's origin.
    """

    kind = "data_sources"
    noun = "data source"
    given = ("split",)
    license: str = ""
    revision: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Curriculum(Spec):
    """The choice of the rows of each round: ``f(rows, round, **options) -> row numbers``, for ``[data] curriculum = "NAME"``.

    ``rows`` is a sequence of dicts, with an empty one for a row that cannot be read. ``round`` counts from 0. The result
    are places in ``rows``, in the order of training. It may omit and repeat rows, and depends on the arguments alone.

    A curriculum that learns from rewards is a class, which is created once per run with its options::

        class Unsolved:
            def __init__(self):
                self.means = {}

            def __call__(self, rows, round):
                return [i for i in range(len(rows)) if self.means.get(i, 0) < 1] or range(len(rows))

            def update(self, scores):  # after each step: mean reward of each row of the step, by its number
                self.means |= scores

            def state(self):  # plain values for a checkpoint; JSON has no dicts with numbers as keys
                return {"means": list(self.means.items())}

            def load_state(self, state):
                self.means = dict(state["means"])

    A round is made when its first row is taken, without the rewards of groups that are sampled ahead.
    """

    kind = "curricula"
    noun = "curriculum"
    given = ("rows", "round")
    methods = ("update", "state", "load_state")


@dataclass(frozen=True, kw_only=True)
class Command(Spec):
    """The command ``engine NAME``, or ``engine GROUP NAME`` for ``"group.name"``; Typer reads the signature of ``load``."""

    kind = "commands"
    noun = "command"
    internal = True


@dataclass(frozen=True, kw_only=True)
class Part(Spec):
    """A part of a run that plugins provide; ``engine_core.contracts.parts`` lists the names and their protocols."""

    kind = "parts"
    noun = "part"
    internal = True


TABLE_SPECS: Mapping[str, type[Spec]] = {
    spec.kind: spec for parent in (Spec, EngineSpec) for spec in parent.__subclasses__() if spec.kind
}
"""Every table hook by its kind: hook ``engine_<kind>``, entry-point group ``engine.<kind>``."""
