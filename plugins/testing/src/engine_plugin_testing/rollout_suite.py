"""The suite of rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_plugin_testing import (
    imports,
    rollout_adapters,
    rollout_flight,
    rollout_models,
    rollout_partial,
    rollout_random,
    rollout_requests,
    rollout_sampling,
    rollout_text,
    rollout_weights,
)
from engine_plugin_testing.rollout_bench import SECOND
from engine_plugin_testing.suite import Suite


class RolloutEngineSuite(
    Suite,
    modules=(
        imports,
        rollout_requests,
        rollout_partial,
        rollout_sampling,
        rollout_models,
        rollout_text,
        rollout_weights,
        rollout_adapters,
        rollout_flight,
        rollout_random,
    ),
):
    """A suite: the contracts of ``engine_core.contracts.engines.RolloutEngine``. ``Suite`` has the other attributes.

    Attributes:
        backend: name of the engine.
        options: its table, as in ``[rollout.NAME]``. Choose float32 here: lower precision hides mistakes.
        model: changes to the tiny model's config (``reference.SHAPE``), for engines that cannot run it.
        second_model: config of a second model on top of ``model``: untied, of another family, with biases and dropout.
        write_model: ``module:function`` or ``file.py:function``; called with (folder, model, seed, tied) it writes the
            folder of a small model. ``model`` is ``reference.SHAPE`` with the suite's ``model`` and
            ``tie_word_embeddings`` filled in; use its ``vocab_size``. Default: ``reference.write_model``.
        reference: as in ``TrainEngineSuite``.
        train_backend: the train engine whose weights, or module, the sampler follows in two contracts. With a custom
            model: your engine.
        device: as in ``torch.device``; empty: what ``ENGINE_TEST_DEVICE`` says, else the accelerator if one exists,
            else the CPU.
        tolerance: largest difference of a log-prob, in nats.
        process: keys of ``[rollout.process]``: the engine runs in a separate process; None: it does not.
    """

    kind = "rollout_engines"
    section = "rollout"
    bench = "engine_plugin_testing.rollout_bench:RolloutBench"
    fields = (
        "backend",
        "options",
        "plugins",
        "model",
        "second_model",
        "write_model",
        "reference",
        "train_backend",
        "device",
        "tolerance",
        "process",
    )

    backend: str = "hf"
    options: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    second_model: Mapping[str, Any] = SECOND
    write_model: str = ""
    reference: str = ""
    train_backend: str = "torch"
    device: str = ""
    tolerance: float = 1e-3
    process: Mapping[str, Any] | None = None
