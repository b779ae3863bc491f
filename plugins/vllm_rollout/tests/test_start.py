"""Start-up errors of vLLM, as its source writes them, in the words of a run file."""

import os
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, ViTConfig

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_vllm_rollout.plugin import VLLMOptions
from engine_plugin_vllm_rollout.start import (
    MEANINGS,
    Place,
    _arguments,
    architecture,
    meaning,
    prepare_environment,
    take_device,
)


@pytest.mark.parametrize(
    ("error", "kind", "key"),
    [
        (
            ValueError(
                "Free memory on device cuda:0 (20.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.5, 69.9 GiB)."
            ),
            EnvironmentProblem,
            "rollout.vllm.gpu_memory_utilization",
        ),
        (
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."),
            ConfigError,
            "rollout.vllm.max_model_len",
        ),
        (
            ValueError(
                "To serve at least one request with the models's max seq len (40960), (4.38 GiB KV cache is needed, which is larger than the available KV cache memory (1.2 GiB)."
            ),
            ConfigError,
            "rollout.vllm.max_model_len",
        ),
        (
            ValueError(
                "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (999) is greater than the derived max_model_len (max_position_embeddings=256)"
            ),
            ConfigError,
            "rollout.vllm.max_model_len",
        ),
        (
            ValueError("Model architectures ['FooForCausalLM'] are not supported for now."),
            ConfigError,
            'rollout.backend, such as "hf"',
        ),
        (
            AssertionError("Chunked prefill is required for mamba cache mode 'align'."),
            ConfigError,
            "rollout.vllm.enable_prefix_caching = false",
        ),
        (
            AssertionError("CuMem allocator can only be used for one instance per process."),
            ConfigError,
            "rollout.vllm.sleep_level = 0",
        ),
        (ImportError("undefined symbol: _ZN3c104cuda"), EnvironmentProblem, "built for another torch"),
    ],
)
def test_what_vllm_says_becomes_one_message_with_the_key(error, kind, key):
    found = meaning(error, "some/model")
    assert type(found) is kind
    assert str(found).startswith("vLLM does not start with model 'some/model'. ")
    assert key in str(found)
    assert "\n" not in str(found)


def test_no_message_about_a_judge_names_a_key_of_the_sampler():
    assert not [advice for _, _, advice in MEANINGS if "rollout" in advice]
    error = AssertionError("CuMem allocator can only be used for one instance per process.")
    assert "Set reward.judge.vllm.sleep_level = 0" in str(meaning(error, "m", "reward.judge.vllm"))


def test_the_telling_line_of_a_validation_error_is_kept():
    error = ValueError(
        "1 validation error\n  Value error, max_model_len (999) is greater than the derived one [x]"
    )
    assert str(meaning(error, "m")).endswith(
        "vLLM says: max_model_len (999) is greater than the derived one [x]"
    )


def test_what_is_not_known_is_left_as_it_is():
    assert meaning(RuntimeError("something else"), "m") is None


def test_a_config_that_names_no_class_is_that_of_a_causal_model():
    assert architecture(Qwen3Config()) == {"architectures": ["Qwen3ForCausalLM"]}
    assert architecture(Qwen3Config(architectures=["Other"])) == {}
    assert architecture(ViTConfig()) == {}  # of no causal model: vLLM says what it makes of it


@pytest.mark.parametrize(
    ("device", "taken"), [("cuda:3", "cuda:3"), ("cuda:0", "cuda:0"), ("cuda", "cuda"), ("cpu", "cuda")]
)
def test_vllm_takes_the_gpu_of_its_worker_and_not_the_first_that_the_process_sees(device, taken):
    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda")))
    take_device(config, torch.device(device))
    assert str(config.device_config.device) == taken


def test_float32_is_float32_in_tritons_kernels_too_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    prepare_environment()
    assert "TRITON_F32_DEFAULT" not in os.environ
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    prepare_environment(exact=True)
    assert os.environ["TRITON_F32_DEFAULT"] == "tf32"
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    prepare_environment(exact=True)
    assert os.environ.pop("TRITON_F32_DEFAULT") == "ieee"


def test_devices_do_not_share_a_compile_cache():
    """What is compiled contains the index of its device: on another one a cached graph fails."""
    from vllm.config import VllmConfig

    places = [Place(torch.device("cuda", index), seed=0, sleeps=True, positions=100) for index in (0, 1)]
    keys = [_arguments(VLLMOptions(), place)["additional_config"] for place in places]
    assert len({VllmConfig(additional_config=key).compute_hash() for key in keys}) == 2
