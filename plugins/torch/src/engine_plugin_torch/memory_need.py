"""The device memory of a role before it is built: counted on a model without weights, by the terms of ``memory``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine_core.contracts.memory import MemoryNeed, MemoryQuestion
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_torch import memory
from engine_plugin_torch.lora import inject
from engine_plugin_torch.memory import Activations, Decoder, Estimate, Held, activations
from engine_plugin_torch.precision import resolved
from engine_plugin_torch.quantize_model import linear_layers
from engine_plugin_torch.quantized_linear import BLOCK, FOUR_BITS, OUTER_BLOCK
from engine_plugin_torch.skeleton import fresh_model
from engine_plugin_torch.speed import speed_of
from engine_plugin_torch.value_models import VALUE_ROLES

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_plugin_torch.budget import MemoryBudget
    from engine_plugin_torch.engine import TorchEngine
    from engine_plugin_torch.precision import Precision

MIB = 2**20
HALF = (torch.float16, torch.bfloat16)


def memory_need(
    engine: type[TorchEngine], config: RoleConfig, model_config: ModelConfig, question: MemoryQuestion
) -> MemoryNeed | None:
    """Estimate the memory of a role on an accelerator with bfloat16; see ``TrainEngine.memory_need``."""
    from engine_plugin_torch.engine import TorchEngine

    options: Any = engine._options(config)
    custom = engine._build_model_optimizer is not TorchEngine._build_model_optimizer
    if custom or options.device not in ("auto", "cuda"):  # another device than the planned one
        return None
    role, trained, budget = question.role, question.trainable, engine.budget_class
    types = resolved(options, config.lora is not None or question.frozen)
    method = getattr(options, "quantize", None)
    module, saved = sketch(config, model_config, role, types.param, method)
    variants = _variants(budget, options, types, module, saved, question)
    if not variants:
        return None
    keys, held = variants[0]
    stored = sum(p.nbytes for p in module.parameters() if p.requires_grad or config.lora is None)
    stored += Held.of(module, trained).optimizer
    shape = Decoder.of(module)
    if shape is None:
        gradients = {"gradients": held.gradients}
        return MemoryNeed(_kept(held), _idle(held), gradients, saved=stored, unknown=("activations",))
    compiled = options.compiles(True, bool(method))
    settings = budget.settings_of(module, options, types, role, compiled, types.compute in HALF)
    act = activations(shape, settings)
    asked, sharers = config.max_tokens_per_rank, getattr(options, "sp", 1)
    most = memory.FEW if asked == "auto" else asked
    how = getattr(options, "activation_checkpointing", False) if trained else False
    wanted = -(-_micro_batch(most, question) // sharers)
    again = False
    if trained:
        keys, held = _first_that_fits(variants, act, wanted, budget, options, question)
    if question.free is not None:
        estimate = Estimate(held, act, question.free)
        again = trained and estimate.checkpointing(wanted)
        if asked == "auto":
            most = estimate.budget(budget.share_of(options, again), trained) * sharers
    share = budget.share_of(options, again) if trained else 0.0
    tokens = _micro_batch(most, question)
    working = _working(held, act, share, tokens // sharers, trained, tokens < (question.tokens or 1 << 62))
    fewest, last = memory.ROUND if asked == "auto" else most, 1.0 if how == "auto" else share
    least = _working(held, act, last, min(fewest, tokens) // sharers, trained, True)
    used = act.constant + tokens // sharers * (act.token(share) if trained else act.passing)
    chosen: dict[str, Any] = {"max_tokens_per_rank": most} if asked == "auto" else {}
    chosen |= {f"{config.backend}.{key}": value for key, value in keys.items()}
    if how == "auto":
        chosen[f"{config.backend}.activation_checkpointing"] = budget.RECOMPUTATION[again]
    return MemoryNeed(
        _kept(held),
        _idle(held),
        working,
        moving=_moving(module, options, config.lora is not None or question.ranks > 1),
        reserve=int(used * memory.RESERVE / (1 - memory.RESERVE)),
        saved=stored,
        least=sum(least.values()),
        chosen=chosen,
        speed=speed_of(options, types, compiled, share),
    )


def _variants(
    budget: type[MemoryBudget],
    options: Any,
    types: Precision,
    module: nn.Module,
    saved: int,
    question: MemoryQuestion,
) -> list[tuple[dict[str, Any], Held]]:
    """Return what a plan may choose for a role, with what the role then holds; empty if the backend has no estimate."""
    trained = question.trainable
    return [
        (keys, dataclasses.replace(held, weights=held.weights - saved))
        for keys, table in (budget.variants(options) if trained else [({}, options)])
        if (held := budget.held_by(module, trained, table, types, question.ranks, question.role)) is not None
    ]


def _first_that_fits(
    variants: list[tuple[dict[str, Any], Held]],
    act: Activations,
    wanted: int,
    budget: type[MemoryBudget],
    options: Any,
    question: MemoryQuestion,
) -> tuple[dict[str, Any], Held]:
    """Return the first variant with room for ``wanted`` tokens and no recomputation, else the first with room, else the last.

    While the free memory is unknown, a variant has room if the whole device has it with recomputation.
    """
    free = question.device_bytes if question.free is None else question.free
    for recomputing in (question.free is None, True):
        share = budget.share_of(options, recomputing)
        for keys, held in variants:
            if act.fitting(Estimate(held, act, free).left, share) >= wanted:
                return keys, held
    return variants[-1]


def sketch(
    config: RoleConfig, model: ModelConfig, role: str, dtype: torch.dtype, method: str | None = None
) -> tuple[nn.Module, int]:
    """Build the model of a role on ``meta``, with its adapter; return it and the bytes that quantization saves.

    Args:
        config: the role's table.
        model: ``[model]`` with the role's folder.
        role: name of the role.
        dtype: type of the weights.
        method: `quantize` of the role.
    """
    with torch.device("meta"):
        module = fresh_model(model.model_copy(update={"attention": "eager"}), role, dtype)
        head = (HEAD,) if role in VALUE_ROLES else ()
        saved, lora = 0, config.lora
        if method is not None:
            layers = linear_layers(module, [HEAD, *(lora.modules_to_save if lora else ())]).values()
            saved = sum(layer.weight.nbytes - quantized_bytes(layer.weight, method) for layer in layers)
        if lora is not None:
            inject(module, lora, role, model.seed, model.path, head)
    return module, saved


def quantized_bytes(weight: torch.Tensor, method: str) -> int:
    """Return the bytes of a quantized weight ``[O, I]``; see ``quantized_linear.pack``."""
    if method not in FOUR_BITS:
        return weight.numel() + 4 * len(weight)
    scales = -(-weight.numel() // BLOCK)
    return -(-weight.numel() // 2) + scales + 4 * -(-scales // OUTER_BLOCK) + 4 * (1 + 16 + 256)


def _micro_batch(most: int, question: MemoryQuestion) -> int:
    """Return the tokens of the largest micro-batch; a longer sequence has a separate one."""
    longest = max(most, question.length or 0)
    return longest if question.tokens is None else min(longest, question.tokens)


def _kept(held: Held) -> dict[str, int]:
    return {"weights": held.weights}


def _idle(held: Held) -> dict[str, int]:
    return {"optimizer": held.optimizer} if held.optimizer else {}


def _working(
    held: Held, act: Activations, share: float, tokens: int, trained: bool, several: bool
) -> dict[str, int]:
    """Return the bytes of a forward pass and, in training, of its backward pass.

    Gradients of one micro-batch appear while its activations disappear; those of earlier ones exist already.

    Args:
        held: constant bytes.
        act: bytes of tokens.
        share: share of the layers that are recomputed.
        tokens: of the largest micro-batch.
        trained: a backward pass follows.
        several: the mini-batch has several micro-batches.
    """
    parts = {"gathered weights": held.gathered, "logits": act.chunks, "weight copies": act.copies + act.head}
    if not trained:
        return parts | {"weight copies": act.copies, "activations": tokens * act.passing}
    kept = tokens * act.token(share)
    gradients = held.gradients if several else max(0, held.gradients - kept - act.chunks)
    return parts | {"gradients": gradients, "activations": kept}


def _moving(module: nn.Module, options: Any, copied: bool) -> int:
    """Return the bytes of the weights under way to a sampler: a bucket, and the largest one merged or gathered."""
    largest = max((p.numel() for p in module.parameters()), default=0) * 4
    return getattr(options, "weights_bucket_mb", 0) * MIB + (largest if copied else 0)
