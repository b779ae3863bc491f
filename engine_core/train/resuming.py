"""Going on with a run: find its newest good checkpoint, refuse what does not fit, then take everything up.

Nothing of the run folder changes before the checkpoint was verified, compared and loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults
from engine_core.config.differences import ROLES, Difference, Verdict, check, differences
from engine_core.config.dump import as_data
from engine_core.config.schedule import config_at
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError, DataError
from engine_core.redaction import Redactor
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.runs.state_files import FORMAT, STATE, load_json, reading
from engine_core.runs.tracking import RunFolder
from engine_core.specs import resolve
from engine_core.train.resume_point import ResumePoint, set_random_state
from engine_core.train.saving import versions

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")

TOKENIZER = "model.tokenizer"
KEYS: Mapping[str, Any] = {
    "step": int,
    "data": dict,
    "trainer": dict,
    "random": dict,
    "metrics": dict,
    "unfinished": dict | None,
    "config": dict,
    "tokenizer": str,
    "roles": list,
    "plugins": dict,
    "versions": dict,
}
"""What ``state.json`` holds."""


@dataclass(frozen=True)
class Resume:
    """A verified checkpoint and what it holds.

    Args:
        path: its folder, below a run's ``checkpoints``.
        state: of ``state.json``.
        force: keys whose change since is wanted.
    """

    path: Path
    state: Mapping[str, Any]
    force: Sequence[str] = field(default=())

    @classmethod
    def find(cls, run: Path, strict: bool = False, force: Sequence[str] = ()) -> Resume:
        """The newest good checkpoint of a run folder.

        Raises:
            DataError: there is none; with ``strict``, the newest one is damaged.
        """
        return cls.at(Checkpoints(Path(run) / "checkpoints").latest(strict), force)

    @classmethod
    def at(cls, path: Path, force: Sequence[str] = ()) -> Resume:
        """A verified checkpoint folder.

        Raises:
            DataError: its state is of another version.
        """
        state = read_state(path)
        if missing := sorted(KEYS.keys() - state.keys()):
            raise DataError(f"{path} was written by another version: its state has no {', '.join(missing)}.")
        for key, kind in KEYS.items():
            if not isinstance(state[key], kind):
                raise DataError(
                    f"{path / STATE}: '{key}' is of the type {type(state[key]).__name__}, which no run writes. "
                    "Take another checkpoint."
                )
        return cls(path, state, tuple(force))

    def claim(self) -> RunFolder:
        """The run's folder, locked for a new attempt; its metrics and rollouts are as they were."""
        folder = RunFolder.open(self.path.parents[1])
        folder.claim(self.state["step"])
        return folder

    def compare(self, run: TrainingRun) -> None:
        """Report what changed since the checkpoint.

        Raises:
            ConfigError: something that would not fit changed, and is not forced.
        """
        self._check_backends(run)
        now_data = as_data(run.config)
        now_config = Redactor.of(now_data).tree(now_data)
        found = differences(self.state["config"], now_config, self.state["roles"], self._movable(run))
        plugins = run.plugins.versions()
        here = {"plugins": plugins, "versions": versions()}
        for table, now in here.items():
            was = self.state[table]
            verdict: Verdict = "warned"
            found += [
                Difference(f"{table}.{name}", was.get(name, "absent"), now.get(name, "absent"), verdict)
                for name in dict.fromkeys([*was, *now])
                if was.get(name) != now.get(name)
            ]
        for difference in check(found, [key for key in self.force if key != TOKENIZER]):
            level = logging.INFO if difference.verdict == "allowed" else logging.WARNING
            log.log(level, "Changed since %s: %s", self.path.name, difference)

    def _movable(self, run: TrainingRun) -> list[str]:
        """Roles that another engine may go on with: it reads the format of what was saved, or nothing was."""
        found = []
        for role in set(ROLES) & set(self.state["roles"]):
            spec: Any = run.plugins.find("train_engines", run.config.role(role).backend)
            file = self.path / role / STATE
            common = file.is_file() and load_json(file).get("format") == FORMAT
            if not file.exists() or (common and spec and "common_checkpoints" in spec.capabilities):
                found.append(role)
        return found

    def _check_backends(self, run: TrainingRun) -> None:
        """Refuse an engine that cannot read what another engine saved in the common format."""
        for role in sorted(set(ROLES) & set(self.state["roles"])):
            table, now = self.state["config"].get(role), run.config.role(role).backend
            if not isinstance(table, dict) or not isinstance(was := table.get("backend"), str) or was == now:
                continue
            spec: Any = run.plugins.find("train_engines", now)
            if spec is None or spec.check_checkpoint is None:
                continue
            if problem := resolve(spec.check_checkpoint)(self.path / role, was, now):
                raise ConfigError(f"{role}.backend: {problem}")

    def check_inputs(self, run: TrainingRun) -> None:
        """Set the data to its position, before any model is built.

        Raises:
            ConfigError: the tokenizer is another one, and `model.tokenizer` is not forced; or there is a
                role now that the checkpoint does not hold.
            DataError: the data files have other numbers of rows.
        """
        if self.state["tokenizer"] != tokenizer_hash(run.tokenizer) and TOKENIZER not in self.force:
            raise ConfigError(
                f"{TOKENIZER}: the tokenizer is not the one of {self.path.name}, so its tokens mean something else. "
                f"Bring its files back, or say that you mean it: --force {TOKENIZER}"
            )
        roles = run.roles(training=True)
        missing = [name for name, role in roles.items() if role.saved and not (self.path / name).is_dir()]
        if missing:
            raise ConfigError(
                f"{self.path.name} holds no role '{missing[0]}': the run had none until now, so there is nothing to go on "
                "with for it. That is a new run: `engine export RUN OUT`, then start one with model.path = 'OUT'."
            )
        run.source.load_state(self.state["data"])

    def go_on(self, run: TrainingRun) -> ResumePoint:
        """Take everything up, then drop what was written after the checkpoint: it is done again."""
        point = self.restore(run)
        log.info("Resumed from %s.", self.path)
        faults.point("resume.before_rewind")
        assert run.folder is not None
        run.folder.rewind(point.step, run.config, run.plugins, unfinished=point.unfinished is not None)
        return point

    def restore(self, run: TrainingRun) -> ResumePoint:
        """Weights, optimizers, random states and the trainer's own state, into a trainer that is set up."""
        for name, role in run.roles(training=True).items():
            if role.saved and name in run.groups:
                run.groups[name].call("load", folder=self.path / name).result()
        state = self.state
        with reading(self.path / STATE):
            run.load_state(state["trainer"], self.path)
            run.skipped_in_a_row = dict(state["trainer"]["skipped_in_a_row"])
            set_random_state(state["random"])
        run.step_done = run.step_now = state["step"]
        run.config_now = config_at(run.config, state["step"]) if state["step"] else run.config
        return ResumePoint.take(run, state["metrics"], state["unfinished"])
