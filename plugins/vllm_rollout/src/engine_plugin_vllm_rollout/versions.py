"""The differences between releases of vLLM, and the uses of its undocumented interfaces.

Written against 0.25.1 and 0.32. This module calls vLLM and replaces nothing in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from vllm.v1.engine import FinishReason

from engine_plugin_vllm_rollout.copy_plan import CopyPlan

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine_plugin_vllm_rollout.log_mass import LogMass


def on_cpu(engine: LLMEngine) -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def parts_elsewhere(engine: LLMEngine) -> bool:
    """Whether the model runs in processes that vLLM has started, a part in each."""
    return bool(engine.vllm_config.parallel_config.distributed_executor_backend == "mp")


def tokens_sampled(engine: LLMEngine, internal_id: str) -> int:
    """Return the number of tokens sampled so far for an unfinished request."""
    return int(engine.output_processor.request_states[internal_id].detokenizer.num_output_tokens())


def partial_output(engine: LLMEngine, internal_id: str) -> RequestOutput:
    """Return a request's output so far, finished as aborted; ``LLMEngine.abort_request`` itself returns nothing."""
    state = engine.output_processor.request_states[internal_id]
    made = state.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
    )
    return cast("RequestOutput", made)


def log_mass_of(worker: Any) -> LogMass:
    """The processor that notes log-probs before the cut, of one worker."""
    processors = worker.model_runner.input_batch.logitsprocs.argmax_invariant
    found: LogMass = next(each for each in processors if type(each).__name__ == "LogMass")
    return found


def likeliest(engine: LLMEngine, ids: Sequence[str]) -> Mapping[str, Sequence[float]]:
    """Log-probs of the likeliest tokens before the cut, of these requests; noted by every rank alike."""
    noted: Mapping[str, Sequence[float]] = engine.collective_rpc("take_likeliest", args=(list(ids),))[0]
    return noted


def needs_layerwise(engine: LLMEngine) -> str:
    """Why copying into the parameters would not change what the kernels read; empty where it does."""
    config = engine.vllm_config.model_config
    if on_cpu(engine):
        return "this is a CPU"
    if config.quantization is not None:
        return f"the model is quantised ({config.quantization})"
    if config.is_moe:
        return "the model is a mixture of experts"
    if config.use_mla:
        return "the model has latent attention"
    return ""


class Whole:
    """Weights for an engine whose model is whole, in this process.

    Args:
        engine: vLLM's.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._plan = CopyPlan(model_of(engine))

    def load(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Copy weights ``[D_1, D_2, ...]`` into the models' own tensors."""
        self._plan.load(bucket)

    def reload(self, weights: list[tuple[str, Tensor]]) -> None:
        """Load all weights ``[D_1, D_2, ...]`` as from a folder."""
        reload(self._engine, weights)

    def close(self) -> None:
        """Nothing is held."""


def model_of(engine: LLMEngine) -> nn.Module:
    """The model that runs in this process."""
    found: list[nn.Module] = engine.apply_model(lambda model: model)
    return found[0]


@contextlib.contextmanager
def loaded(engine: LLMEngine) -> Iterator[set[str]]:
    """Within it, ``load_weights`` of the model is watched.

    Yields:
        Parameters that no call has loaded, once all calls are over. Empty where the model does not tell which it has
        loaded, or runs in processes of vLLM's own.
    """
    missing: set[str] = set()
    if parts_elsewhere(engine):
        yield missing
        return
    model: Any = model_of(engine)
    whole, found = model.load_weights, []

    def watched(weights: Any) -> Any:
        found.append(whole(weights))
        return found[-1]

    model.load_weights = watched
    missing |= {name for name, _ in model.named_parameters()}
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
    if on_cpu(engine):
        engine.apply_model(refresh_tied_head)


@torch.no_grad()
def refresh_tied_head(model: Any) -> None:
    """Refresh a tied head, which receives no weight and on a CPU keeps a packed copy of the old one."""
    head, embedding = getattr(model, "lm_head", None), None
    inner = getattr(model, "model", None)
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
