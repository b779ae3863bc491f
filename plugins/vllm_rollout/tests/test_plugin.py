"""What the engine learns of this plugin before vLLM is needed."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine_core import load_config
from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_testing.imports import HEAVY
from engine_plugin_vllm_rollout import installed
from engine_plugin_vllm_rollout.plugin import VLLMOptions


def test_importing_the_plugin_and_checking_options_loads_neither_torch_nor_vllm():
    code = (
        "from engine_plugin_vllm_rollout.plugin import VLLMOptions, engine_rollout_engines; import sys; "
        "engine_rollout_engines(); VLLMOptions(block_size=32); "
        f"assert not {set(HEAVY) | {'vllm'}!r} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_option_of_vllm_is_passed_on():
    options = VLLMOptions(max_num_batched_tokens=4096, block_size=32)
    assert options.passed_on() == {"max_num_batched_tokens": 4096, "block_size": 32}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"max_num_seq": 3}, r"'max_num_seq' is no option of vLLM [\d.]+\. Did you mean 'max_num_seqs'\?"),
        ({"block_size": "many"}, r"'block_size' is 'many' \(str\); vLLM [\d.]+ expects int"),
        ({"enable_chunked_prefill": 3}, r"'enable_chunked_prefill' is 3 \(int\); vLLM [\d.]+ expects bool"),
        ({"model": "x"}, r"'model' is set by `model\.path` in a run file; remove it here\."),
        (
            {"pipeline_parallel_size": 2},
            r"'pipeline_parallel_size' cannot be set: one engine samples in one process",
        ),
        ({"logprobs_mode": "raw_logprobs"}, r"'logprobs_mode' cannot be set: the trainer needs log-probs"),
        ({"sleep_level": 3}, "sleep_level"),
        ({"quantization": "awq"}, "quantization"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"quantization": "fp8", "dtype": "float32"}, r"quantization = 'fp8' computes in 16 bits: set dtype"),
        ({"dtype": "fp8"}, "dtype"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_options_are_checked(table, words):
    with pytest.raises(ValidationError, match=words):
        VLLMOptions(**table)


def test_fewer_bits_are_another_policy_and_a_cpu_build_without_their_kernels_says_so(monkeypatch):
    assert VLLMOptions().other_policy == ""
    assert VLLMOptions(kv_cache_dtype="fp8").other_policy == "rollout.vllm.kv_cache_dtype = 'fp8'"
    monkeypatch.setattr(installed, "for_cpus", lambda: False)
    both = VLLMOptions(quantization="fp8", kv_cache_dtype="fp8_e5m2")
    assert both.other_policy == (
        "rollout.vllm.quantization = 'fp8' and rollout.vllm.kv_cache_dtype = 'fp8_e5m2'"
    )
    monkeypatch.setattr(installed, "for_cpus", lambda: True)
    with pytest.raises(ValidationError, match=r"'fp8' needs kernels that this CPU build of vLLM \("):
        VLLMOptions(quantization="fp8")


def test_a_vllm_without_a_head_of_its_own_type_is_told(monkeypatch):
    assert VLLMOptions(fp32_head=True).fp32_head
    monkeypatch.setattr(installed, "_source", lambda file: "")
    with pytest.raises(
        ValidationError, match=r"fp32_head: vLLM .* computes logits in the type of the weights"
    ):
        VLLMOptions(fp32_head=True)


def test_without_vllm_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValidationError,
        match=r"vLLM is not installed; .* 0\.25\.1 or newer, .* up to 0\.32\. On a GPU: pip install",
    ):
        VLLMOptions()
    with pytest.raises(
        ValidationError, match=r"'max_num_seq': did you mean 'max_num_seqs'\? vLLM is not installed"
    ):
        VLLMOptions(max_num_seq=4, swap_space=1)


@pytest.mark.parametrize(
    ("version", "fits"), [("0.25.0", False), ("0.25.1", True), ("0.32.4+cu130", True), ("0.33.0", True)]
)
def test_older_releases_of_vllm_are_refused(monkeypatch, version, fits):
    monkeypatch.setattr(installed, "version", lambda: version)
    assert bool(installed.problem()) is not fits
    assert fits or installed.problem().startswith(
        f"vLLM {version} is installed; the plugin works with 0.25.1 or newer, and was tested up to 0.32."
    )


def test_the_health_of_vllm_is_its_version_and_build_or_what_to_install(monkeypatch):
    monkeypatch.setattr(installed, "version", lambda: "0.25.1")
    monkeypatch.setattr(installed, "for_cpus", lambda: False)
    assert installed.health() == "vLLM 0.25.1, the build for GPUs"
    monkeypatch.setattr(installed, "version", lambda: "0.9.2")
    with pytest.raises(
        EnvironmentProblem, match=r"vLLM 0\.9\.2 is installed; the plugin works with 0\.25\.1"
    ):
        installed.health()


@pytest.mark.parametrize(
    ("version", "warned"), [("0.32.4+cu130", False), ("0.33.0rc1", True), ("of unknown version", False)]
)
def test_newer_releases_of_vllm_are_used_with_a_warning(caplog, version, warned):
    installed.warn_of_release(version, "[rollout.vllm] ")
    assert bool(caplog.records) is warned
    assert not warned or caplog.messages == [
        f"[rollout.vllm] vllm {version} is newer than 0.32, the newest release that was tested. If the run fails, install a "
        "tested one: pip install 'vllm==0.32.*'."
    ]


RUN = """
[model]
path = "model"
[rollout]
backend = "vllm"
max_response_tokens = 36
[rollout.vllm]
max_model_len = {held}
[[reward]]
name = "numeric"
[data]
train = "data.jsonl"
max_prompt_tokens = 12
{more}
"""


TEACHER = """
[algorithm]
advantage = "distill"
[teacher]
path = "teacher"
backend = "vllm"
[teacher.vllm]
max_model_len = {held}
"""


@pytest.mark.parametrize(
    ("held", "more", "words"),
    [
        (48, "", ""),
        (
            47,
            "",
            r"rollout\.vllm\.max_model_len: got 47, but the longest prompt \(data\.max_prompt_tokens = 12\) and its response "
            r"\(rollout\.max_response_tokens = 36\) have 48 tokens: long sequences would be cut or refused\. Set it to 48, or "
            r"lower data\.max_prompt_tokens or rollout\.max_response_tokens\.",
        ),
        (30, "", r"Set it to 48, or lower data\.max_prompt_tokens or"),
        (
            48,
            "validation = 'v.jsonl'\n[eval]\nmax_response_tokens = 40",
            r"\(eval\.max_response_tokens = 40\) have 52 tokens",
        ),
        (
            48,
            "[[eval.set]]\nname = 'hard'\npath = 'hard.jsonl'\nmax_response_tokens = 40",
            r"\(eval\.set\.hard\.max_response_tokens = 40\) have 52 tokens",
        ),
        (
            48,
            TEACHER.format(held=48),
            r"teacher\.vllm\.max_model_len: got 48, .* and one more token have 49 tokens",
        ),
        (48, TEACHER.format(held=49), ""),
        (
            48,
            "[schedule]\n'rollout.max_response_tokens' = [[3, 40]]",
            r"from step 3 on \(\[schedule\]\): got 48",
        ),
    ],
)
def test_a_sampler_that_does_not_hold_prompt_and_response_is_refused_before_anything_starts(
    tmp_path, held, more, words
):
    (tmp_path / "run.toml").write_text(RUN.format(held=held, more=more))
    if not words:
        assert load_config(tmp_path / "run.toml").rollout.options.max_model_len == held
        return
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "run.toml")
