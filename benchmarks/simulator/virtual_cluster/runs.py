"""A simulated run: the trainer of a run file, its source of rollouts and its threads, on a virtual clock."""

from __future__ import annotations

import collections
import json
import logging
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import load_config
from engine_core.errors import ConfigError
from engine_core.train.trainer import Trainer
from engine_plugin_trainers.async_trainer import AsyncTrainer
from virtual_cluster.episodes import in_virtual_time
from virtual_cluster.rewards import SimulatedRewards
from virtual_cluster.runtime import Cluster
from virtual_cluster.speeds import SPEEDS, Lengths, Speeds
from virtual_cluster.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from engine_core.types import Rollout

PLUGIN = Path(__file__).parent / "plugin.py"
WARM = 3  # steps that are not counted, and as many more as rollouts run ahead
PROMPT_WORD = "word"


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of running: the trainer and the changes to its run file."""

    name: str
    about: str
    staleness: int = 0  # async.max_staleness; 0: trainer "rl", all devices for both sides
    settings: Mapping[str, Any] = field(default_factory=dict)


EARLY_STOP = {"rollout.over_sampling": 1.5, "rollout.partial_rollouts": True}

MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("sync", "in turn, on all devices"),
        Mode(
            "early-stop",
            "in turn, 1.5 times the groups; unfinished responses resume in the next step",
            settings=EARLY_STOP,
        ),
        Mode(
            "early-stop-rounds",
            "the same with samplers that are asked in rounds, as `run.deterministic` and CPUs have it",
            settings=EARLY_STOP | {"run.deterministic": True},
        ),
        Mode("async-1", "one step off", 1),
        Mode("async-2", "at most 2 policy versions ahead", 2),
        Mode("async-4", "at most 4 policy versions ahead", 4),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a simulation."""

    workers: int = 8  # devices
    mode: str = "sync"
    speeds: Speeds = SPEEDS["qwen3-8b"]
    lengths: Lengths = field(default_factory=Lengths)
    prompts_per_worker: float = 2.0  # of a step, so that the work of a worker stays the same
    group_size: int = 8
    prompt_tokens: int = 128
    trainer_share: float = 0.25  # of the devices, if trainers and samplers have separate ones
    weights: str = "relay"
    rewards_per_worker: float = 1.0  # processes that score
    data_workers: int = 0  # processes that tokenize prompts (`data.num_workers`); 0: the controller does
    steps: int = 6  # that count
    seed: int = 0
    tools: Mapping[str, float] | None = None  # options of the environment `tools`; None: single responses

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ConfigError(f"--workers {self.workers}: expected at least 2, one for each side.")
        if not 0 < self.trainer_share < 1:
            raise ConfigError(
                f"--trainer-share {self.trainer_share:g}: expected a share of the workers, above 0 and below 1."
            )

    @property
    def prompts(self) -> int:
        """The number P of prompts of a step."""
        return max(round(self.workers * self.prompts_per_worker), 1)

    @property
    def trainers(self) -> int:
        """The number of devices that train, if trainers and samplers have separate ones."""
        return min(max(round(self.workers * self.trainer_share), 1), self.workers - 1)


@dataclass(slots=True)
class Moment:
    """The state of a simulation when a step begins."""

    seconds: float
    controller: float  # CPU seconds so far
    trained: float  # seconds of all trainers' work
    sampled: float
    messages: int
    bytes: int


class Observation:
    """An observer of a trainer in a simulation: it installs clock, cluster and rewards, and records the steps.

    Args:
        run: the trainer, not yet set up; three of its methods are replaced.
        cluster: the simulated cluster of the run.
        setting: the simulation's parameters.

    Attributes:
        moments: the state of the simulation when each step began.
        ages: number of tokens of each step by age in policy versions.
    """

    def __init__(self, run: Trainer, cluster: Cluster, setting: Setting) -> None:
        self.run, self.cluster, self.setting = run, cluster, setting
        self.moments: list[Moment] = []
        self.ages: list[collections.Counter[int]] = []
        run.clock = cluster.clock
        run.live["cluster"] = cluster
        self._begin_step, self._rollouts = run.begin_step, run.rollouts
        replaced: Any = run
        replaced.make_rewards, replaced.begin_step = self._simulated_rewards, self._note_step
        replaced.rollouts = self._note_rollouts
        if setting.tools:
            make = run._make_environment
            replaced._make_environment = lambda columns: in_virtual_time(make(columns), cluster.clock)

    def _simulated_rewards(self, columns: Collection[str]) -> SimulatedRewards:
        run = self.run
        workers = max(round(self.setting.rewards_per_worker * self.setting.workers), 1)
        seconds = self.cluster.speeds.reward_seconds
        return SimulatedRewards(run.plugins, run.tokenizer, run.clock, workers, seconds)

    def _note_step(self, step: int) -> None:
        runtime: Any = self.run.runtime
        clock, crew = self.cluster.clock, runtime.crew
        spent = clock.controller.seconds, runtime.busy("actor"), runtime.busy("rollout")
        self.moments.append(Moment(clock.now(), *spent, crew.messages, crew.bytes))
        self._begin_step(step)

    def _note_rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        found, metrics = self._rollouts(step)
        with self.cluster.clock.aside():
            version = self.run.version
            ages: collections.Counter[int] = collections.Counter()
            for rollout in found:
                old, counts = (version - rollout.policy_versions[rollout.loss_mask]).unique(
                    return_counts=True
                )
                ages.update(dict(zip(old.tolist(), counts.tolist(), strict=True)))
            self.ages.append(ages)
        return found, metrics


def simulate(setting: Setting) -> dict[str, Any]:
    """Simulate a run.

    Returns:
        ``step_s`` (mean over the counted steps) and its phases (means), ``idle_samplers`` and ``idle_trainers`` (share
        of their devices' time), ``idle`` (of all devices), ``tokens_per_s`` (learned from), ``staleness`` (share of
        the learned tokens by age in policy versions), ``controller_s`` (CPU seconds a step), ``controller_share`` (of
        the step's virtual time), ``messages`` and ``bytes`` of a step through the controller, and ``lines``: the
        metrics of the counted steps.
    """
    mode = MODES[setting.mode]
    warm, last = WARM + mode.staleness, WARM + mode.staleness + setting.steps
    total = last + max(mode.staleness, 1)  # the last steps request no new rollouts, so they do not count
    apart = mode.staleness > 0
    samplers = setting.workers - setting.trainers if apart else setting.workers
    trainers = setting.trainers if apart else setting.workers
    clock = VirtualClock()
    cluster = Cluster(clock, setting.speeds, setting.lengths, trainers, samplers, not apart, setting.weights)
    kind = AsyncTrainer if apart else Trainer
    with tempfile.TemporaryDirectory() as folder, Quiet():
        # only the config of the model is read
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 3}))
        # allow_code: the one plugin file is this package's, outside of the caller's folder
        settings, rows = _settings(setting, mode, total, folder), _rows(setting, total)
        live: dict[str, Any] = {"data": rows}
        if setting.data_workers:  # data workers read files
            live, file = {}, Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            settings |= {"data.train": [str(file)], "data.num_workers": setting.data_workers}
        config = load_config(overrides=settings, allow_code=True)
        run = kind(config, tokenizer=_tokenizer(), rewards=[_unused], **live)
        observed = Observation(run, cluster, setting)
        clock.controller.switch(True)
        try:
            run.train()
            assert run.folder is not None
            lines = (run.folder.path / "metrics.jsonl").read_text("utf-8").splitlines()
        finally:
            clock.controller.switch(False)
            run.close()
    counted = [json.loads(line) for line in lines][warm:last]
    return _result(setting, cluster, counted, observed.moments[warm : last + 1], observed.ages[warm:last])


def _result(
    setting: Setting, cluster: Cluster, lines: list[dict[str, Any]], moments: list[Moment], ages: list[Any]
) -> dict[str, Any]:
    first, end, steps = moments[0], moments[-1], len(lines)
    seconds = end.seconds - first.seconds
    trained, sampled = end.trained - first.trained, end.sampled - first.sampled
    devices = setting.workers
    tokens: collections.Counter[int] = sum(ages, collections.Counter())
    all_tokens = sum(tokens.values())
    controller = (end.controller - first.controller) / steps
    names = ("generate", "reward", "log_probs", "train", "sync")
    return {
        "workers": devices,
        "mode": setting.mode,
        "weights": setting.weights,
        "samplers": cluster.samplers,
        "trainers": cluster.trainers,
        "prompts_per_step": setting.prompts,
        "step_s": seconds / steps,
        **{f"{name}_s": sum(line.get(f"time/{name}", 0.0) for line in lines) / steps for name in names},
        "idle_samplers": 1 - sampled / seconds / cluster.samplers,
        "idle_trainers": 1 - trained / seconds / cluster.trainers,
        "idle": 1 - (sampled + trained) / seconds / devices,
        "tokens_per_s": all_tokens / seconds,
        "staleness": {str(age): tokens[age] / all_tokens for age in sorted(tokens)},
        "controller_s": controller,
        "controller_share": controller * steps / seconds,
        "messages": (end.messages - first.messages) / steps,
        "bytes": (end.bytes - first.bytes) / steps,
        "lines": lines,
    }


def _settings(setting: Setting, mode: Mode, steps: int, folder: str) -> dict[str, Any]:
    """Return the run file."""
    found: dict[str, Any] = {
        "plugins": [str(PLUGIN)],
        "runtime.backend": "simulated",
        "actor.backend": "simulated",
        "rollout.backend": "simulated",
        "rollout.group_size": setting.group_size,
        "algorithm.advantage": "batch_mean",  # for groups of any size
        "rollout.max_response_tokens": setting.lengths.most,
        "data.prompts_per_step": setting.prompts,
        "data.max_prompt_tokens": setting.prompt_tokens,
        "run.dir": folder,
        "run.name": "simulated",
        "run.steps": steps,
        "run.seed": setting.seed,
        "tracking.trackers": [],
        "tracking.rollouts_every_steps": 0,
        "checkpoint.at_end": False,
        "model.path": folder,
        **mode.settings,
    }
    if setting.tools:
        hour = {"timeout_seconds": 3600.0, "tool_timeout_seconds": 3600.0}
        tools = {
            "name": "slow_tools",
            "max_turns": setting.tools["turns"],
            "slow_tools": dict(setting.tools),
            **hour,
        }
        found["environment"] = tools
    if mode.staleness:
        found |= {"trainer": "async", "async.max_staleness": mode.staleness}
        found |= {
            "placement.pools": {"train": 1, "serve": 1},
            "placement.actor": "train",
            "placement.rollout": "serve",
        }
    return found


def _rows(setting: Setting, steps: int) -> list[dict[str, str]]:
    """Return prompts for all steps."""
    words = " ".join([PROMPT_WORD] * setting.prompt_tokens)
    return [{"prompt": words} for _ in range(setting.prompts * (steps + 1) * 2)]


def _tokenizer() -> Any:
    """Return a tokenizer with one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, PROMPT_WORD: 2}
    made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=PROMPT_WORD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _unused(completions: list[str]) -> list[float]:
    """Score nothing: a placeholder where a reward is required; ``SimulatedRewards`` replaces it."""
    return [0.0] * len(completions)


class Quiet:
    """A context within which the log of a run is not shown."""

    def __enter__(self) -> None:
        self.before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *error: object) -> None:
        logging.disable(self.before)
