"""The names that this plugin offers; imports neither torch nor vLLM, because ``engine validate`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine_core import hookimpl
from engine_core.errors import nearest
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


WITHOUT_PLAN = 0.5
"""The meaning of ``gpu_memory_utilization = "auto"`` where no memory plan has chosen a share."""


class EngineOptions(Options):
    """The options of every vLLM engine: the keys below, and every option of ``EngineArgs`` under vLLM's own name."""

    model_config = ConfigDict(extra="allow")

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights and of the computation."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Maximum number of tokens of prompt and response together; default: the model's maximum. A smaller value leaves more memory for sequences."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the GPU's memory for the sampler's weights, activations and KV cache. The trainer needs the rest. ``auto``: by the memory plan (``engine plan``), the share that the responses of a step need and the trainer leaves; 0.5 where there is no plan."""
    max_num_seqs: int = Field(default=512, gt=0)
    """Maximum number of sequences decoded at the same time."""
    enforce_eager: bool = False
    """Use no compilation and no CUDA graphs. vLLM then starts in seconds, but samples several times slower."""
    enable_prefix_caching: bool = True
    """Compute a prompt that several requests share (a group) only once."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of processes that share each layer (tensor parallelism). The value must divide the number of heads. A sampler's parts run in the processes of its pool. For a model that only scores, vLLM starts the processes. Experimental on GPUs."""

    @model_validator(mode="after")
    def _known_to_vllm(self) -> Self:
        if missing := installed.problem():  # then only names like ours can be recognized as wrong
            meant = {name: nearest(name, type(self).model_fields) for name in self.passed_on()}
            wrong = [f"'{name}': did you mean '{key}'?" for name, key in meant.items() if key]
            raise ValueError(" ".join([*wrong, missing]))
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
    """Memory that ``offload_idle_roles`` frees. 0: none. 1: the KV cache is freed, and weights that do not stay on the GPU move to the host. 2: the KV cache and the weights are freed; the next update sends the weights again, and the sampler cannot sample before that update."""
    log_probs: Literal["auto", "sampled", "full"] = "auto"
    """Log-probs that vLLM reports when top-p or top-k cut the distribution. ``sampled``: log-probs of the cut distribution. ``full``: also log-probs of the whole distribution, after temperature. ``auto``: ``full`` if ``[rollout]`` cuts the distribution."""
    quantization: Literal["fp8"] | None = None
    """Keep the weights of linear layers in 8 bits. Each update quantizes them again. Experimental: the sampler's policy then differs from the trained policy, and `algorithm.correction` weighs its tokens."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache; ``auto``: the type of the computation. An 8-bit cache holds twice as many tokens. It is experimental, like `quantization`."""
    adapter: bool = False
    """In a run with ``[actor.lora]``: vLLM keeps the base model, and each update sends only the adapter instead of merged weights. A rank over 16 also needs vLLM's `max_lora_rank`."""
    per_request_seeds: bool = True
    """Give each response a separate random generator. A response then does not depend on the other responses sampled at the same time, and a resumed run samples as if it had not stopped. ``false``: all responses use vLLM's single generator, which saves one call to the device for each sequence and token."""
    fp32_head: bool = False
    """Compute the logits in float32 from 16-bit weights. The logits are closer to those of a float32 trainer; sampling is a little slower."""

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
    """Memory that ``offload_idle_roles`` frees while other roles work. 0: none. 1: the KV cache. With 1, the weights of a judge or a reward model also move to the host; the weights of a teacher stay on the GPU."""


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
            health="engine_plugin_vllm_rollout.installed:health",
            families="engine_plugin_vllm_rollout.families:FAMILIES",
            capabilities=frozenset({"pause", "sleep", "support", "partial"}),
        ),
    }
