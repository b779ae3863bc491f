"""What a trainer knows of the models of its run: how long sequences can be, whether the teacher fits, what serves as reference.

The reference model of an actor with a LoRA adapter is the actor itself without the adapter: no second model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.data import load_tokenizer, tokens_differ
from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config

if TYPE_CHECKING:
    from engine_core.config import EngineConfig, ModelConfig
    from engine_core.train.run import TrainingRun
    from engine_core.types import Batch

log = logging.getLogger("engine")

POSITION_TABLES = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"}
)
"""Decoders (``model_type``) that are known to look positions up in a table of ``max_position_embeddings`` rows, and to fail beyond it.
Where positions are computed, the number is what the model was trained for, and longer sequences can be learned."""


def held_tokens(run: TrainingRun) -> int:
    """Tokens of prompt and response together that both the model and a sampler that is told its length can hold."""
    told = getattr(run.config.rollout.options, "max_model_len", None)
    return min(model_length(run), told or 1 << 30)


def model_length(run: TrainingRun) -> int:
    """Tokens that the model can hold; one that does not say sets no limit."""
    return getattr(_text_config(run), "max_position_embeddings", None) or 1 << 30


def table_length(run: TrainingRun) -> int | None:
    """Positions of a model that has a table of them, the longest sequence that it can learn; None of others."""
    text = _text_config(run)
    if getattr(text, "model_type", None) not in POSITION_TABLES:
        return None
    length: int | None = getattr(text, "max_position_embeddings", None)
    return length


def _text_config(run: TrainingRun) -> Any:
    """Of the text model in transformers' words; None of models that a plugin builds."""
    if "model" in run.live:
        hf_config = getattr(run.live["model"], "config", None)
    elif run.plugins.overrides("engine_build_model"):
        return None
    else:
        hf_config = load_hf_config(run.config.model)
    get = getattr(hf_config, "get_text_config", None)
    return get() if get is not None else None


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
    assert teacher is not None  # see completeness.check_complete
    assert teacher.path
    return run.config.model_of("teacher").model_copy(update={"path": teacher.path, "tokenizer": None})


def _student_path(run: TrainingRun) -> str:
    return run.config.actor.path or run.config.model.path


def _vocabulary(model: ModelConfig) -> int:
    return int(load_hf_config(model).get_text_config().vocab_size)


class WithoutAdapter(WorkerGroup):
    """The workers of a role with an adapter, as the base model below it.

    Args:
        group: of the role; its ``infer`` is what a reference model is asked for.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        if method != "infer":
            raise RuntimeError(f"The reference is the actor without its adapter: it can infer, not {method}.")
        return self.group.call(method, batch, split, adapter=False, **plain)


def start_groups(
    runtime: Runtime, config: EngineConfig, roles: Mapping[str, Role], total_steps: int
) -> dict[str, WorkerGroup]:
    """Start the workers of these roles; a reference that is the actor's base gets none of its own.

    Raises:
        ConfigError: such a reference was to follow the actor.
    """
    if "ref" not in roles or not config.ref_is_base:
        return runtime.start(roles, total_steps)
    if roles["ref"].refreshed:
        raise ConfigError(
            "The reference is the actor without its adapter ([actor.lora]), and the weights below an adapter never "
            "change, so it cannot follow the actor. Give it a model of its own: [ref] path."
        )
    groups = runtime.start({name: role for name, role in roles.items() if name != "ref"}, total_steps)
    log.info("The reference is the actor without its adapter: no second model is built.")
    return {**groups, "ref": WithoutAdapter(groups["actor"])}
