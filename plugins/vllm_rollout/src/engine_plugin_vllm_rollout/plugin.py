"""The names that this plugin offers; imports neither torch nor vLLM, because ``engine validate`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine_core import hookimpl
from engine_core.specs import Options, RolloutBackend, TrainBackend
from engine_plugin_vllm_rollout import installed
from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

OURS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "hf_overrides": "model.override",
    "seed": "run.seed",
    "enable_sleep_mode": "sleep_level",
    "sleep_mode": "sleep_level",
}
"""Options of vLLM that the run says elsewhere, and where."""
FIXED = {
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled from",
    "generation_config": "the sampling options and the end tokens are those of the run file",
    "skip_tokenizer_init": "stop strings are looked for in text",
    "return_sampling_mask": "what a cut distribution left comes with the log-probs",
    "pipeline_parallel_size": "one engine samples in one process",
    "data_parallel_size": "each process of a pool has its own engine",
    "distributed_executor_backend": "tensor_parallel_size and the sampler's pool decide it",
    "weight_transfer_config": "weights come from the trainer's stream",
    "runner": "this engine generates",
    "enable_lora": "`adapter = true` switches it on",
    "max_loras": "there is one adapter, that of the run",
    "logits_processors": "the trainer would not know of a distribution that they change",
}
"""Options of vLLM that this plugin sets, and why."""


class EngineOptions(Options):
    """The options of every vLLM engine: the keys below, and every option of ``EngineArgs`` under vLLM's own name."""

    model_config = ConfigDict(extra="allow")

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights and of the computation."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Tokens of prompt and response together; default: what the model can hold. Less leaves more room for sequences."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory for weights, activations and KV cache of the sampler; the trainer needs the rest."""
    max_num_seqs: int = Field(default=512, gt=0)
    """Sequences decoded at one time."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts in seconds and samples several times slower."""
    enable_prefix_caching: bool = True
    """A prompt that several requests share (a group) is read once."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Parts that every layer is cut into, one in each process of the pool; those of a model that only scores are in processes that vLLM starts. Must divide the number of heads. Experimental on GPUs."""

    @model_validator(mode="after")
    def _known_to_vllm(self) -> Self:
        if missing := installed.problem():
            raise ValueError(missing)
        problems = self._own_problems()
        for name, value in self.passed_on().items():
            if name in OURS:
                problems.append(f"'{name}' is set by `{OURS[name]}` in a run file; remove it here.")
            elif name in FIXED:
                problems.append(f"'{name}' cannot be set: {FIXED[name]}. Remove it.")
            elif why := installed.option_problem(name, value):
                problems.append(why)
        if problems:
            raise ValueError(" ".join(problems))
        return self

    def _own_problems(self) -> list[str]:
        """Return the problems that the installed vLLM has with keys of this table."""
        return []

    def passed_on(self) -> dict[str, Any]:
        """The options of vLLM that are no key of ours."""
        return dict(self.model_extra or {})


class VLLMOptions(EngineOptions):
    """``[rollout.vllm]``: the keys below, and every option of vLLM's engine (``EngineArgs``) under vLLM's own name."""

    sleep_level: Literal[0, 1, 2] = 1
    """What ``offload_idle_roles`` gives back. 0: nothing. 1: the KV cache, and the weights to the host where they are not kept. 2: all of it; the next update sends the weights again, and nothing is sampled before."""
    log_probs: Literal["auto", "sampled", "full"] = "auto"
    """Which log-probs vLLM reports when top-p or top-k cut the distribution. ``sampled``: those of the cut distribution. ``full``: also those of the whole one, after temperature. ``auto``: ``full`` if ``[rollout]`` cuts."""
    quantization: Literal["fp8"] | None = None
    """Weights of linear layers in 8 bits, made again from each update. Experimental: the sampler is then another policy than the one that learns, see `other_policy`."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache; ``auto``: that of the computation. In 8 bits it holds twice as many tokens, experimental as `quantization`."""
    adapter: bool = False
    """In a run with ``[actor.lora]``: vLLM keeps the base and is given the adapter alone with each update, not merged weights. Ranks over 16 need vLLM's `max_lora_rank` too."""
    per_request_seeds: bool = True
    """Each response has its own random numbers, so that it does not depend on which others are sampled at the same time, and a resumed run samples as if it had not stopped. ``false``: all draw from vLLM's one generator, which spares a call to the device for every sequence and token."""
    fp32_head: bool = False
    """Logits are computed in float32 from 16-bit weights: nearer to a trainer in float32, a little slower."""

    @property
    def other_policy(self) -> str:
        """Return why samples come from another policy than the trained one; empty if they do not."""
        keys = [f"quantization = '{self.quantization}'"] if self.quantization else []
        keys += [f"kv_cache_dtype = '{self.kv_cache_dtype}'"] if self.kv_cache_dtype != "auto" else []
        return " and ".join(f"rollout.vllm.{key}" for key in keys)

    def _own_problems(self) -> list[str]:
        problems = [installed.head_problem()] if self.fp32_head else []
        if self.quantization:
            problems.append(installed.fp8_problem())
            if self.dtype == "float32":
                problems.append(
                    "quantization = 'fp8' computes in 16 bits: set dtype to 'bfloat16' or 'float16'."
                )
        if self.adapter:
            problems.append(installed.adapter_problem())
            if self.sleep_level == 2:
                problems.append(
                    "adapter: with sleep_level = 2 the base would be given up, and no update brings it. Set 1."
                )
        return list(filter(None, problems))


class FrozenOptions(EngineOptions):
    """``[teacher.vllm]``: a model that is never trained (a teacher, a reward model, a judge) on vLLM. Refused for `actor`, `critic` and `ref`. The table takes the keys below and every option of vLLM's engine (``EngineArgs``) under vLLM's name."""

    sleep_level: Literal[0, 1] = 1
    """What ``offload_idle_roles`` gives back while others work. 0: nothing. 1: the KV cache. The weights of a judge or a reward model then go to the host, those of a teacher stay."""


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    return {
        "vllm": TrainBackend(
            load="engine_plugin_vllm_rollout.frozen:VLLMFrozenEngine", config=FrozenOptions, frozen_only=True
        ),
        "vllm_server": TrainBackend(
            load="engine_plugin_vllm_rollout.served:VLLMServedEngine",
            config=VLLMServerOptions,
            frozen_only=True,
            remote=True,
        ),
    }


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    return {
        "vllm": RolloutBackend(
            load="engine_plugin_vllm_rollout.engine:VLLMRolloutEngine",
            config=VLLMOptions,
            capabilities=frozenset({"pause", "sleep", "support", "partial"}),
        ),
    }
