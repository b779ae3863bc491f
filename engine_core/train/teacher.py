"""The teacher of a run: what must be true of it before anything is built."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from engine_core.data import load_tokenizer, tokens_differ
from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")


def check_teacher(run: TrainingRun) -> None:
    """Refuse a teacher that reads other tokens than the student.

    Raises:
        ConfigError: an id means another token to it; its backend does not give log-probs at the run's temperature.
        DataError: no tokenizer loads from its folder.
    """
    _check_temperature(run)
    theirs = load_tokenizer(_teacher_model(run), table="teacher")
    if why := tokens_differ(run.tokenizer, theirs):
        raise ConfigError(
            f"teacher.path: '{_teacher_model(run).path}' has another tokenizer than the student: {why}. The teacher is "
            "asked about the student's tokens: take one of the student's family."
        )
    if theirs.chat_template != run.tokenizer.chat_template:
        log.info("The teacher has another chat template; it is shown the student's.")


def _check_temperature(run: TrainingRun) -> None:
    """A backend that only scores knows probabilities, from which those at another temperature do not follow."""
    config = run.config
    backend = config.role("teacher").backend
    own: float | None = getattr(config.options, "temperature", None)
    key = "rollout.temperature" if own is None else f"{config.trainer}.temperature"
    temperature = config.rollout.temperature if own is None else own
    spec: Any = run.plugins.spec("train_engines", backend)
    if spec.frozen_only and temperature != 1.0:
        raise ConfigError(
            f"{key}: teacher.backend = '{backend}' tells log-probs at temperature 1, and this is {temperature:g}. Set it to "
            "1, or take another train engine for the teacher."
        )


def common_vocabulary(run: TrainingRun) -> int:
    """V of student and teacher, which both give a distribution over.

    Raises:
        ConfigError: their models have different numbers of tokens.
    """
    teacher = _vocabulary(_teacher_model(run))
    if run.plugins.overrides("engine_build_model"):
        return teacher  # the student's is known once it is built
    if live := run.live.get("model"):
        student = int(live.config.get_text_config().vocab_size) if hasattr(live, "config") else teacher
    else:
        student = _vocabulary(run.config.model.model_copy(update={"path": _student_path(run)}))
    if student != teacher:
        raise ConfigError(
            f"teacher.path: its model gives {teacher} tokens (vocab_size), the student's {student}, so their "
            "distributions cannot be compared, though the tokenizer is the same. Take a teacher of the same size of "
            'vocabulary, or learn from the sampled tokens alone: trainer = "rl" with algorithm.advantage = "distill".'
        )
    return teacher


def _teacher_model(run: TrainingRun) -> ModelConfig:
    teacher = run.config.teacher
    assert teacher is not None  # see assemble.check_complete
    assert teacher.path
    return run.config.model_of("teacher").model_copy(update={"path": teacher.path, "tokenizer": None})


def _student_path(run: TrainingRun) -> str:
    return run.config.actor.path or run.config.model.path


def _vocabulary(model: ModelConfig) -> int:
    return int(load_hf_config(model).get_text_config().vocab_size)
