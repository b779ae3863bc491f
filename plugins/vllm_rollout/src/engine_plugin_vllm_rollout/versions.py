"""The differences between releases of vLLM, and the uses of its undocumented interfaces.

Written against 0.25.1 and 0.32. This module calls vLLM and replaces nothing in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from vllm.v1.engine import FinishReason

from engine_core.contracts.weight_sync import common_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine_plugin_vllm_rollout.log_mass import LogMass


def on_cpu() -> bool:
    """Return whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def tokens_sampled(engine: LLMEngine, internal_id: str) -> int:
    """Return the number of tokens sampled so far for an unfinished request."""
    detokenizer: Any = engine.output_processor.request_states[internal_id].detokenizer
    return int(detokenizer.num_output_tokens())


def partial_output(engine: LLMEngine, internal_id: str) -> RequestOutput:
    """Return a request's output so far, finished as aborted; ``LLMEngine.abort_request`` itself returns nothing."""
    state = engine.output_processor.request_states[internal_id]
    made = state.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
    )
    return cast("RequestOutput", made)


def likeliest(engine: LLMEngine, ids: Sequence[str]) -> Mapping[str, Sequence[float]]:
    """Return the log-probs of the likeliest tokens before the cut, of these requests; every rank records them."""

    def take(worker: Any) -> Mapping[str, Sequence[float]]:
        """Take them from the logits processor of a worker."""
        processors = worker.model_runner.input_batch.logitsprocs.argmax_invariant
        noting: LogMass = next(each for each in processors if type(each).__name__ == "LogMass")
        return noting.take(ids)

    return engine.collective_rpc(take)[0]


def needs_layerwise(engine: LLMEngine) -> bool:
    """Return whether copying into the parameters would not change what the kernels read."""
    config = engine.vllm_config.model_config
    return bool(on_cpu() or config.quantization is not None or config.is_moe or config.use_mla)


def weight_dtype(engine: LLMEngine) -> torch.dtype | None:
    """Return the type of the model's weights; None if it is quantized or its weights have several types."""
    if engine.vllm_config.model_config.quantization is not None:
        return None
    return common_dtype(model_of(engine).parameters())


def model_of(engine: LLMEngine) -> Any:
    """Return the module that runs in this process; if the model is cut, this process's part."""
    return engine.apply_model(lambda model: model)[0]


@contextlib.contextmanager
def loaded(engine: LLMEngine) -> Iterator[set[str]]:
    """Within it, ``load_weights`` of the model is watched.

    Yields:
        Parameters that no call has loaded, once all calls are over. Empty if the model does not return which it has
        loaded.
    """
    model = model_of(engine)
    whole, found = model.load_weights, []

    def watched(weights: Any) -> Any:
        found.append(whole(weights))
        return found[-1]

    model.load_weights = watched
    missing = {name for name, _ in model.named_parameters()}
    try:
        yield missing
    finally:
        del model.load_weights
    if None in found:
        missing.clear()
    else:
        missing -= set().union(*found)


@torch.no_grad()
def reload(engine: LLMEngine, weights: list[tuple[str, Tensor]]) -> None:
    """Load all weights ``[D_1, D_2, ...]`` as from a folder: each layer is processed again, into the storage of kernels."""
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    if on_cpu():
        engine.apply_model(refresh_tied_head)
        engine.apply_model(refresh_experts)


@torch.no_grad()
def refresh_experts(model: Any) -> None:
    """Pack the weights of experts for the kernels of CPUs, which vLLM does after the first load alone."""
    for layer in list(model.modules()):
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


@torch.no_grad()
def refresh_tied_head(model: Any) -> None:
    """Refresh a tied head, which receives no weight and on a CPU keeps a packed copy of the old one."""
    text = getattr(model, "language_model", model)  # of a model that also reads images
    head, embedding = getattr(text, "lm_head", None), None
    inner = getattr(text, "model", None)
    if inner is not None:
        embedding = getattr(inner, "embed_tokens", None)
    if head is None or embedding is None or head.weight is not embedding.weight:
        return
    head.quant_method.process_weights_after_loading(head)


def load_adapter(engine: LLMEngine, number: int, folder: Path) -> LoRARequest:
    """Load the adapter of a folder in the place of the one before; what requests for it carry.

    Raises:
        ValueError: vLLM does not take it; the one before is still there.
    """
    from vllm.lora.request import LoRARequest

    name, path = "policy", str(folder)
    engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
    return LoRARequest(name, number, path)


def release_kv_cache(engine: LLMEngine) -> bool:
    """Give the KV cache's memory back and keep the weights; False where this release cannot (below 0.32)."""
    release = getattr(engine, "release_kv_cache_memory", None)
    if release is None:
        return False
    engine.sleep(level=0, mode="keep")  # it wants a paused scheduler
    release()
    return True


def shut_down(engine: LLMEngine) -> None:
    """Free the engine's memory; process groups that others made stay."""
    engine.engine_core.shutdown()
