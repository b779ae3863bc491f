"""The suite of train engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine_plugin_testing import (
    imports,
    train_adapter_forms,
    train_adapters,
    train_outputs,
    train_precision,
    train_roles,
    train_runs,
    train_sequences,
    train_shares,
    train_sleep,
    train_state,
    train_steps,
    train_weights,
)
from engine_plugin_testing.suite import Suite

MODULES = (
    imports,
    train_outputs,
    train_steps,
    train_sleep,
    train_runs,
    train_shares,
    train_weights,
    train_state,
    train_roles,
    train_adapters,
    train_adapter_forms,
    train_precision,
    train_sequences,
)


class TrainEngineSuite(Suite, modules=MODULES):
    """A suite: the contracts of ``engine_core.contracts.engines.TrainEngine``. ``Suite`` has the other attributes.

    Attributes:
        backend: name of the engine.
        options: its table, as in ``[actor.NAME]``. Choose float32 here: lower precision hides mistakes.
        on_accelerator: further options where ``ENGINE_TEST_DEVICE`` selects accelerators: float32, where the engine
            would choose by the device.
        model: changes to the tiny model's config (``reference.SHAPE``), for engines that cannot run it.
        write_model: ``module:function`` or ``file.py:function``; called with (folder, model, seed, tied) it writes the
            folder of a small model. ``model`` is ``reference.SHAPE`` with the suite's ``model`` and
            ``tie_word_embeddings`` filled in; use its ``vocab_size``. Default: ``reference.write_model``.
        reference: ``module:function`` or ``file.py:function``; called with a model folder it returns the module to
            compare with: ``forward(input_ids, position_ids)`` of shape [1, n] to ``logits`` [1, n, V], parameters
            named as in the folder. Default: ``AutoModelForCausalLM`` in float64.
        value_reference: of a suite with a ``reference`` and roles, like ``reference``: returns the module of a critic in
            float64, ``forward(input_ids, position_ids)`` to values [1, n], each of the tokens up to it, parameters named
            as in ``named_weights``. Without it, gradients of values are not compared.
        optimizer: ``adamw``, the core's own, or ``sgd`` (``w <- w - lr g``): how gradients are derived from the
            weights before and after a step.
        gradients: for another optimizer: ``module:function`` or ``file.py:function``, called with the engine after
            ``forward_backward``; returns pairs of a name of ``named_weights`` and its whole gradient [D_1, ...], before
            clipping. Declare the contracts of the optimizer, of clipping and of schedules unsupported.
        device: as in ``torch.device``; empty: what ``ENGINE_TEST_DEVICE`` says, else the accelerator if one exists,
            else the CPU.
        tolerance: largest difference of a log-prob, in nats.
        gradient_tolerance: largest difference of a gradient, as a share of its norm.
        norm_tolerance: largest difference of a gradient's norm, as a share of it.
        roles: roles besides the actor that the engine serves: ``critic``, ``reward_model``.
        second_model: changes to the tiny model's config for one contract; of another family, with biases, dropout and a
            sliding window. Not used with ``write_model`` or a ``model_type`` in ``model``; empty: no such model.
        lora: tables of ``[actor.lora]``, besides `rank` and `alpha`, that contracts of adapters try in turn; take out those
            that the engine refuses, which is tested. The model is untied.
        in_bf16: further options under which the engine computes in bfloat16 above float32 weights; empty: not tested.
        in_fp16: further options under which it computes in float16 with a loss scale that is too large for the first steps.
        bit_exact: a resumed run continues bit for bit; False allows rounding.
    """

    kind = "train_engines"
    section = "actor"
    bench = "engine_plugin_testing.train_bench:TrainBench"
    fields = (
        "backend", "options", "plugins", "model", "second_model", "write_model", "reference", "value_reference",
        "optimizer", "gradients", "device", "tolerance", "gradient_tolerance", "norm_tolerance", "bit_exact",
        "lora", "in_bf16", "in_fp16",
    )  # fmt: skip

    backend: str = "torch"
    options: Mapping[str, Any] = {}
    on_accelerator: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    second_model: Mapping[str, Any] = {
        "model_type": "qwen2",
        "attention_dropout": 0.25,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    }
    write_model: str = ""
    reference: str = ""
    value_reference: str = ""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    gradients: str = ""
    device: str = ""
    tolerance: float = 1e-4
    gradient_tolerance: float = 2e-3
    norm_tolerance: float = 1e-6
    roles: Sequence[str] = ()
    lora: Sequence[Mapping[str, Any]] = train_adapters.KINDS
    in_bf16: Mapping[str, Any] = {}
    in_fp16: Mapping[str, Any] = {}
    bit_exact: bool = True
