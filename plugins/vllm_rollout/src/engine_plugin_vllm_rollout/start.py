"""Starting vLLM in this process, and what its start-up errors mean to the author of a run file."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_vllm_rollout import installed
from engine_plugin_vllm_rollout.plugin import WITHOUT_PLAN
from engine_plugin_vllm_rollout.transformers_classes import restore_classes

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine_plugin_vllm_rollout.plugin import FrozenOptions, VLLMOptions

LOG_MASS = "engine_plugin_vllm_rollout.log_mass:LogMass"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
CPU_CACHE = 1 << 30  # bytes of KV cache on a CPU, where a share of the memory would be most of the machine
CPU_TOKENS = 8192  # read in one step at most

MEANINGS: tuple[tuple[str, type[ConfigError] | type[EnvironmentProblem], str], ...] = (
    (
        r"Free memory on device|Available memory on node|less than desired",
        EnvironmentProblem,
        "Less memory is free than {key}.gpu_memory_utilization asks for. Lower it: the trainer's share does not count in it.",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed|larger than the available KV cache memory"
        r"|larger than the maximum number of tokens that can be stored",
        ConfigError,
        "There is no room for the KV cache of one sequence. Raise {key}.gpu_memory_utilization (on a CPU "
        "{key}.kv_cache_memory_bytes), or lower {key}.max_model_len to prompt and response together.",
    ),
    (
        r"max_model_len .*is greater than the derived",
        ConfigError,
        "{key}.max_model_len is more than the model can hold. Lower it, or leave it out.",
    ),
    (
        r"[Mm]odel architectures?\b.*not supported|not supported for now|[Nn]o vLLM implementation|does not recognize this architecture",
        ConfigError,
        'vLLM does not know this model. Use another {table}.backend, such as "{name}".',
    ),
    (
        r"head.?size|[Nn]o valid attention backend|not supported by any attention",
        ConfigError,
        'vLLM has no attention for this model on this device. Choose one by {key}.attention_backend, another {key}.dtype, or {table}.backend = "{name}".',
    ),
    (
        r"must be divisible by tensor parallel size|World size .* is larger than the number of available GPUs",
        ConfigError,
        "The model cannot be cut into {key}.tensor_parallel_size parts here: it must divide the number of heads, and each part "
        "needs a GPU.",
    ),
    (
        r"out of memory|OutOfMemory|CUDA error: out of memory",
        EnvironmentProblem,
        "The memory ran out. Lower {key}.gpu_memory_utilization, {key}.max_num_seqs or {key}.max_num_batched_tokens.",
    ),
    (
        r"Chunked prefill is required for mamba",
        ConfigError,
        "On a CPU vLLM keeps no prefixes of a model with recurrent layers. Set {key}.enable_prefix_caching = false.",
    ),
    (
        r"one instance per process",
        ConfigError,
        "Two engines of vLLM in one process cannot both sleep. Set {key}.sleep_level = 0 for one of them.",
    ),
    (
        r"vllm\._C|undefined symbol|cannot open shared object",
        EnvironmentProblem,
        "vLLM's kernels do not load: they were built for another torch or another device. Install the vLLM whose requirements name your torch.",
    ),
)
"""vLLM's text, the class of the error, and what to do. ``{key}`` is the table of vLLM's options, ``{table}`` the one that
chose vLLM, and ``{name}`` another backend for it."""


@dataclass(frozen=True)
class Place:
    """The device of an engine and the settings of its run."""

    device: torch.device
    seed: int
    sleeps: bool  # the device can give memory back
    positions: int  # tokens of prompt and response that the engine can hold
    tells_mass: bool = False  # log-probs of the whole distribution are wanted
    ranks: int = 1  # processes of the pool; several share a model among themselves


def prepare_environment(tells_mass: bool = False, exact: bool = False, key: str = "rollout.vllm") -> None:
    """Set the environment variables that vLLM reads in this process; values that the user has set stay.

    Args:
        tells_mass: the model runner must support ``LogMass``, which the second one of vLLM 0.32 does not.
        exact: the computation is in float32, including Triton's kernels: their default on a GPU keeps 10 bits of a
            factor (TF32), and vLLM's attention in float32 is such a kernel.
        key: the table of its options, for messages.

    Raises:
        ConfigError: a value that the user has set excludes what the run needs.
    """
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",  # it would report to its authors
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are the trainer's too
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # this process has threads, which a fork would break
    }
    if exact:
        wanted["TRITON_F32_DEFAULT"] = "ieee"
    if tells_mass:
        wanted[RUNNER] = "0"
        if os.environ.get(RUNNER, "0") != "0":
            raise ConfigError(
                f"{key}.log_probs: log-probs of the whole distribution need vLLM's first model runner, and the environment "
                f'has {RUNNER}={os.environ[RUNNER]}. Unset it, or set {key}.log_probs = "sampled".'
            )
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within this process


def start(
    model: Path | str,
    tokenizer: Path | str,
    options: VLLMOptions | FrozenOptions,
    place: Place,
    *,
    load_weights: bool,
    override: dict[str, Any],
    trust_remote_code: bool,
    more: Mapping[str, Any] | None = None,
    key: str = "rollout.vllm",
) -> LLMEngine:
    """Start vLLM's engine in this process, ready to sample.

    Args:
        model: folder or hub name.
        tokenizer: folder.
        options: of vLLM.
        place: device and seed.
        load_weights: False leaves them random: the first update brings them.
        override: changes to the model's config.
        trust_remote_code: as in ``[model]``.
        more: options of vLLM that this use of it sets.
        key: the table of its options, for messages.

    Raises:
        ConfigError, EnvironmentProblem: vLLM does not start; the key to change is named. What it says that
            this plugin does not know is raised as it is.
    """
    prepare_environment(place.tells_mass, options.dtype == "float32", key)
    installed.warn_of_release(installed.version())
    with _translated(model, key), _undisturbed():
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        arguments = _arguments(options, place) | {
            "model": str(model),
            "tokenizer": str(tokenizer),
            "load_format": "auto" if load_weights else "dummy",
            "hf_overrides": override,
            "trust_remote_code": trust_remote_code,
            **(more or {}),
        }
        config = EngineArgs(**(arguments | options.passed_on())).create_engine_config()
        take_device(config, place.device)
        made = LLMEngine(
            config,
            executor_class=Executor.get_class(config),
            log_stats=False,
            multiprocess_mode=False,
        )
        if options.tensor_parallel_size == 1:  # else the model is in other processes
            made.apply_model(restore_classes)
        return made


def take_device(config: Any, device: torch.device) -> None:
    """Have vLLM's engine of one process use this GPU: by itself it takes number 0 of those that the process sees.

    Args:
        config: of vLLM.
        device: of the worker.
    """
    if device.type == "cuda" and device.index is not None:
        config.device_config.device = device  # vLLM's executor reads the number of it


def architecture(config: PretrainedConfig, classifies: bool = False) -> dict[str, Any]:
    """The class of a causal model, for a config that names none: vLLM would take the model for one of embeddings.

    Args:
        config: of the model.
        classifies: it is a sequence classifier instead.

    Returns:
        What to override; nothing where the config names its class, or transformers knows none of its type.
    """
    from transformers.models.auto import modeling_auto

    kind = "SEQUENCE_CLASSIFICATION" if classifies else "CAUSAL_LM"
    names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
    name = None if config.architectures else names.get(config.model_type)
    return {"architectures": [name]} if name else {}


def _arguments(options: VLLMOptions | FrozenOptions, place: Place) -> dict[str, Any]:
    share = options.gpu_memory_utilization
    made: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": WITHOUT_PLAN if share == "auto" else share,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enable_sleep_mode": place.sleeps and options.sleep_level > 0,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # top-k and top-p leave up to the whole vocabulary
        "generation_config": "vllm",  # temperature and end tokens are the run file's
        "distributed_executor_backend": "uni",
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "seed": place.seed,
        "use_tqdm_on_load": False,
        # part of the key of vLLM's compile cache, which leaves the index out, though compiled code contains it
        "additional_config": {"device_index": place.device.index or 0},
    }
    for name in ("quantization", "kv_cache_dtype"):
        if (value := getattr(options, name, None)) not in (None, "auto"):
            made[name] = value
    if getattr(options, "adapter", False):
        made |= {"enable_lora": True, "max_loras": 1}
    if place.ranks > 1:
        made["distributed_executor_backend"] = _launcher(place.device)
    elif options.tensor_parallel_size > 1:
        made["distributed_executor_backend"] = "mp"
    if place.tells_mass:
        made["logits_processors"] = [LOG_MASS]
    if place.device.type == "cpu":
        made |= {
            "kv_cache_memory_bytes": CPU_CACHE,
            # a prompt that is read in two parts draws a number that a seeded generator of a CPU cannot take back
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_TOKENS, place.positions),
        }
    return made


def _launcher(device: torch.device) -> Any:
    """Return vLLM's executor for one part of a model in each process of the pool."""
    if device.type != "cpu":
        return "external_launcher"
    from engine_plugin_vllm_rollout.cpu_executor import LauncherOnCPU

    return LauncherOnCPU


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore what vLLM changes in the process while it starts: random states and a function of torch."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads = torch.set_num_threads  # the CPU build replaces it by one that does nothing
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_device:
            torch.cuda.set_rng_state_all(on_device)


@contextlib.contextmanager
def _translated(model: Path | str, key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, ImportError, AssertionError, NotImplementedError, OSError) as error:
        if (meant := meaning(error, str(model), key)) is None:
            raise
        raise meant from error


def meaning(
    error: BaseException, model: str, key: str = "rollout.vllm"
) -> ConfigError | EnvironmentProblem | None:
    """A start-up error of vLLM in the words of a run file; None where it is not known."""
    text = f"{type(error).__name__}: {error}"
    for pattern, kind, advice in MEANINGS:
        if re.search(pattern, text):
            table = key.removesuffix(".vllm")
            name = "hf" if table in ("rollout", "reward.judge") else "torch"
            hint = advice.format(key=key, table=table, name=name)
            return kind(f"vLLM does not start with model '{model}'. {hint} vLLM says: {_said(str(error))}")
    return None


def _said(text: str) -> str:
    """The telling line: validation errors of pydantic begin with a count."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("Value error,")] or lines or ["nothing"]
    return telling[0].removeprefix("Value error,").strip()[:500]
