"""The suite of rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_core.testing import imports, rollout_requests, rollout_sampling, rollout_weights
from engine_core.testing.suite import Suite


class RolloutEngineSuite(Suite, modules=(imports, rollout_requests, rollout_sampling, rollout_weights)):
    """Contracts of ``engine_core.engines.base.RolloutEngine``. See ``Suite`` for the other attributes.

    Attributes:
        backend: name of the engine.
        options: its table, as in ``[rollout.NAME]``. Choose float32 here: lower precision hides mistakes.
        model: changes to the tiny model's config (``reference.SHAPE``), for engines that cannot run it.
        write_model: ``module:function`` or ``file.py:function``; called with (folder, ``model``, seed, tied)
            it writes the folder of a small model. Default: ``reference.write_model``, of transformers.
        reference: as in ``TrainEngineSuite``.
        device: as in ``torch.device``; empty: the accelerator if there is one, else the CPU.
        tolerance: largest difference of a log-prob, in nats.
    """

    kind = "rollout_engines"
    section = "rollout"
    bench = "engine_core.testing.rollout_bench:RolloutBench"
    fields = ("backend", "options", "plugins", "model", "write_model", "reference", "device", "tolerance")

    backend: str = "hf"
    options: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    write_model: str = ""
    reference: str = ""
    device: str = ""
    tolerance: float = 1e-3
