"""The train engine ``vllm``: a frozen model of the run, a teacher's or a reward's, scored by vLLM in this process.

A classifier runs by vLLM's pooling runner; a language model is asked about given tokens (``scoring``). Weights are
read once from the folder. Left out: LoRA adapters, several ranks, temperatures other than 1.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.errors import ConfigError
from engine_core.model_config import has_no_weights, load_hf_config
from engine_plugin_vllm_rollout.engine import whole
from engine_plugin_vllm_rollout.frozen_engine import FrozenEngine
from engine_plugin_vllm_rollout.memory import Memory
from engine_plugin_vllm_rollout.plugin import FrozenOptions
from engine_plugin_vllm_rollout.scoring import TABLES, Given, check_lengths, infer
from engine_plugin_vllm_rollout.start import Place, architecture, prepare_environment, start

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch


class VLLMFrozenEngine(FrozenEngine):
    """A train engine for frozen models that vLLM runs in this process."""

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        self.options: FrozenOptions = config.options or FrozenOptions()
        self.where = f"{TABLES[context.role]}.vllm"
        path = model_config.path
        classifies = context.role == "reward_model"
        if has_no_weights(path):
            raise ConfigError(
                f"{TABLES[context.role]}.path: '{path}' holds no weights, and this model is not trained."
            )
        prepare_environment()
        hf_config = load_hf_config(model_config)
        text_config = hf_config.get_text_config()
        held = getattr(text_config, "max_position_embeddings", None)
        self._llm = start(
            path,
            path,
            self.options,
            Place(
                context.device,
                context.seed,
                context.device.type == "cuda",
                self.options.max_model_len or held or 0,
            ),
            load_weights=True,
            override=architecture(hf_config, classifies) | model_config.override,
            trust_remote_code=model_config.trust_remote_code,
            more=_more(classifies),
            key=self.where,
        )
        self.vocabulary = int(text_config.vocab_size)
        self.memory = Memory(self._llm, self.options.sleep_level if context.device.type == "cuda" else 0)
        self.model = InProcess(self._llm, self.where)

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute the outputs [T] or [T, K] that ``scoring`` supports."""
        self.memory.before_sampling()
        return infer(self.model, batch, outputs, self.vocabulary, self.where)

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Release device memory; the parts of trained models are ignored."""
        self.memory.sleep([part for part in keep if part == "weights"])

    def wake(self, only: Sequence[str] | None = None) -> None:
        self.memory.wake(None if only is None else [part for part in only if part == "weights"])

    def close(self) -> None:
        """Free vLLM's memory."""
        if self._llm is None:
            return
        from engine_plugin_vllm_rollout import versions

        versions.shut_down(self._llm)
        del self.memory, self.model
        self._llm = None  # type: ignore[assignment]
        gc.collect()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()


class InProcess:
    """``scoring.Model`` by an engine of vLLM in this process.

    Args:
        llm: with nothing queued.
        where: table of its options, for messages.
    """

    def __init__(self, llm: LLMEngine, where: str) -> None:
        self._llm, self._where = llm, where
        self._numbers = itertools.count()

    def scores(self, sequences: Sequence[list[int]]) -> list[float]:
        from vllm import PoolingParams

        params = [PoolingParams(task="classify", use_activation=False) for _ in sequences]
        found = [0.0] * len(sequences)
        for i, output in self._run(sequences, params):
            found[i] = float(output.outputs.data.reshape(-1)[0])
        return found

    def next_tokens(self, prompts: Sequence[list[int]], candidates: Sequence[list[int]]) -> list[list[float]]:
        params = [
            _sampling(logprob_token_ids=list(dict.fromkeys(ids)), flat_logprobs=True) for ids in candidates
        ]
        found: list[list[float]] = [[]] * len(prompts)
        for i, output in self._run(prompts, params):
            flat = output.outputs[0].logprobs
            log_probs_by_id = dict(zip(flat.token_ids, flat.logprobs, strict=True))
            found[i] = [log_probs_by_id[token] for token in candidates[i]]
        return found

    def given(self, sequences: Sequence[list[int]], top_k: int) -> list[Given]:
        params = [_sampling(prompt_logprobs=top_k, flat_logprobs=True) for _ in sequences]
        found: list[Any] = [None] * len(sequences)
        for i, output in self._run(sequences, params):  # one sequence at a time is a list of Python's numbers
            found[i] = _given(output.prompt_logprobs, len(sequences[i]) - 1, top_k)
        return found

    def _run(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index, output) of each prompt as it finishes. If the caller stops early, the rest is dropped."""
        from vllm.inputs.engine import tokens_input

        check_lengths(prompts, self._llm.vllm_config.model_config.max_model_len + _spare(params), self._where)
        waiting: dict[str, tuple[int, str]] = {}  # by our ids: place, vLLM's id
        try:
            for i, (ids, one) in enumerate(zip(prompts, params, strict=True)):
                name = f"frozen-{next(self._numbers)}"
                waiting[name] = (i, self._llm.add_request(name, tokens_input(ids), one))
            while waiting:
                with whole():
                    finished = [output for output in self._llm.step() if output.finished]
                for output in finished:
                    yield waiting.pop(output.request_id)[0], output
        finally:
            if waiting:
                self._llm.abort_request([internal for _, internal in waiting.values()], internal=True)


def _more(classifies: bool) -> dict[str, Any]:
    """Options of vLLM for a model that is only asked; log-probs are those of the model, at temperature 1."""
    kind = {"runner": "pooling"} if classifies else {"logprobs_mode": "raw_logprobs"}
    return {**kind, "skip_tokenizer_init": True}  # tokens in, numbers out: nothing is decoded


def _sampling(**asked: Any) -> Any:
    """Return parameters that sample one token, which vLLM requires; the token is not used."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=1.0,
        seed=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **asked,
    )


def _spare(params: Sequence[Any]) -> int:
    """A pooled sequence needs no room for a token to be sampled."""
    return int(bool(params) and type(params[0]).__name__ == "PoolingParams")


def _given(flat: Any, count: int, top_k: int) -> Given:
    """Parse vLLM's flat list: empty at the first token, then at each the token itself and the likeliest ones."""
    width = 1 + top_k
    log_probs = torch.tensor(flat.logprobs, dtype=torch.float64).reshape(count, width)
    ids = torch.tensor(flat.token_ids, dtype=torch.int64).reshape(count, width)
    return Given(log_probs[:, 0], ids[:, 1:], log_probs[:, 1:])
