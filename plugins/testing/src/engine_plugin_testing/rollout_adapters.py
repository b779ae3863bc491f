"""The contract of the option ``adapter``: the sampler keeps its base model and receives LoRA adapters alone."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import torch

from engine_core.contracts.weight_sync import ADAPTER_CONFIG, ADAPTER_PREFIX
from engine_plugin_testing.contracts import REFUSALS, close, contract, refused
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.engines import RolloutEngine

RANK, ALPHA = 4, 12
ENDINGS = ("q_proj", "v_proj", "down_proj")  # of layers that get an adapter
PROMPTS = ("2+2=", "Once upon a time")
SCALES = (0.15, 0.25)  # standard deviations of A and B: the product changes log-probs by tenths of a nat


def _adapter(weights: dict[str, Tensor], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw A [RANK, n] and B [m, RANK] for each layer [m, n] of ``ENDINGS``, by its name without ``.weight``."""
    draws, found = torch.Generator().manual_seed(seed), {}
    for name, value in sorted(weights.items()):
        layer = name.removesuffix(".weight")
        if value.ndim == 2 and layer.endswith(ENDINGS):
            a = SCALES[0] * torch.randn(RANK, value.shape[1], generator=draws)
            b = SCALES[1] * torch.randn(value.shape[0], RANK, generator=draws)
            found[layer] = (a, b)
    return found


def _stream(adapter: dict[str, tuple[Tensor, Tensor]], path: str) -> list[tuple[str, Tensor]]:
    """Return the stream of an adapter: the bytes [N] of peft's config, then A and B of each layer."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": path,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in adapter}),
    }
    data = torch.frombuffer(bytearray(json.dumps(config).encode()), dtype=torch.uint8)
    halves = [
        (f"{ADAPTER_PREFIX}{layer}.lora_{half}.weight", value.clone())
        for layer, pair in adapter.items()
        for half, value in zip("AB", pair, strict=True)
    ]
    return [(ADAPTER_CONFIG, data), *halves]


@contract(
    option="adapter",
    package="peft",
    catches=(
        "an adapter without its scale",
        "an adapter on top of the one before",
        "an adapter that is not used",
        "half of an adapter kept from before",
        "whole weights taken for an adapter",
        "half of an update of an adapter sampled from",
    ),
)
def an_adapter_alone_is_sampled_like_merged_weights(bench: RolloutBench) -> None:
    """With the option ``adapter``, the policy after an update is the model's folder plus the adapter: ``W + alpha / r B A``.

    Each update replaces the adapter before it, also by one that changes nothing. An update of whole weights, or without
    a tensor, is refused; a mixture of two adapters is never sampled from, and a whole update repairs the engine.
    """
    path = bench.model(tied=False)
    weights = dict(bench.stream(path))
    first, second = _adapter(weights, 1), _adapter(weights, 2)
    if not first:  # a model of the suite that has no such layers
        return
    engine = bench.engine(path, options={"adapter": True})
    nothing = {layer: (a, torch.zeros_like(b)) for layer, (a, b) in second.items()}
    for version, adapter in enumerate((first, second, nothing, first), 1):
        engine.update_weights(iter(_stream(adapter, path)), version)
        _check_policy(bench, engine, path, adapter, version)
    with refused("an update of whole weights"):
        engine.update_weights(iter(weights.items()), 5)
    with refused("an adapter without its last tensor"):
        engine.update_weights(iter(_stream(second, path)[:-1]), 6)
    assert engine.version == 4, f"The version after refused updates is {engine.version}; expected 4."
    with contextlib.suppress(*REFUSALS):  # refusing to sample until a whole update is also correct
        _check_policy(bench, engine, path, first, 4)
    engine.abort([request.id for request in bench.requests(PROMPTS, group=2, seed=5)])
    engine.update_weights(iter(_stream(second, path)), 7)
    _check_policy(bench, engine, path, second, 7)


def _check_policy(
    bench: RolloutBench,
    engine: RolloutEngine,
    path: str,
    adapter: dict[str, tuple[Tensor, Tensor]],
    version: int,
) -> None:
    """Check log-probs and versions of responses of the model at ``path`` with an adapter."""
    module = bench.reference(path)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if (layer := name.removesuffix(".weight")) in adapter:
                a, b = adapter[layer]
                value.add_(b.double() @ a.double(), alpha=ALPHA / RANK)
    requests = bench.requests(PROMPTS, group=2, seed=5)
    for request, rollout in zip(requests, engine.generate(requests), strict=True):
        expected, _ = expected_log_probs(module, rollout, request.sampling)
        found = rollout.rollout_log_probs[rollout.prompt_length :]
        close(found, expected, bench.tolerance, f"rollout_log_probs with adapter {version}")
        versions = set(rollout.policy_versions[rollout.loss_mask].tolist())
        assert versions == {version}, f"policy_versions are {sorted(versions)}; expected {version}."
