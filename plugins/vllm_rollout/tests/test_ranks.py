"""A model cut over the processes of a pool, beside the trainer's own parts: what is refused, and that a run is the same."""

import json
import subprocess
import sys

import pytest

from engine_core.config import RolloutConfig
from engine_core.errors import ConfigError
from engine_plugin_testing.reference import write_model
from engine_plugin_vllm_rollout.ranks import check_ranks, layout_of

RUN = """
[model]
path = "model"
[actor]
backend = "fsdp"
[actor.optim]
lr = 1e-3
[rollout]
backend = "vllm"
group_size = 4
max_response_tokens = 16
[rollout.vllm]
dtype = "float32"
enforce_eager = true
max_num_seqs = 16
kv_cache_memory_bytes = 67108864
[[reward]]
name = "numeric"
[data]
train = "train.jsonl"
prompts_per_step = 4
[runtime]
backend = "torchrun"
[runtime.torchrun]
processes = 2
[run]
steps = 3
"""
APART = ["rollout.process={}"]  # an engine for each rank, which has the whole model
CUT = ["rollout.vllm.tensor_parallel_size=2"]


def test_neighbouring_ranks_are_parts_of_one_model_and_the_first_leads():
    layouts = [layout_of(2, rank, 4) for rank in range(4)]
    assert [(at.dp_rank, at.dp_size, at.is_leader) for at in layouts] == [
        (0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False),
    ]  # fmt: skip
    assert layout_of(1, 0, 1).is_leader


@pytest.mark.parametrize(
    ("parts", "size", "keys", "told"),
    [
        (1, 2, {}, r"\[rollout\.process\].*tensor_parallel_size = 2"),
        (3, 4, {}, "does not divide the 4 processes.*as many processes as parts"),
        (2, 2, {"request_timeout_seconds": 5.0}, "by their own clocks"),
        (2, 1, {}, r"does not divide the 1 processes of the sampler's pool\..*\[rollout\.process\] has one"),
    ],
)
def test_a_pool_that_cannot_hold_the_parts_is_refused_with_the_key(parts, size, keys, told):
    with pytest.raises(ConfigError, match=told):
        check_ranks(RolloutConfig(backend="vllm", **keys), parts, size)


@pytest.mark.parametrize(
    ("parts", "size", "told"),
    [
        (
            1,
            2,
            r"^reward\.judge\.backend = 'vllm'.*placement\.reward.*vllm\.tensor_parallel_size = 2",
        ),
        (3, 4, r"^reward\.judge\.vllm\.tensor_parallel_size = 3 does not divide the 4 processes"),
        (2, 1, r"^reward\.judge\.vllm\.tensor_parallel_size = 2 does not divide .* of its pool"),
    ],
)
def test_a_judges_pool_is_refused_with_the_keys_of_the_judge(parts, size, told):
    with pytest.raises(ConfigError, match=told) as caught:
        check_ranks(RolloutConfig(backend="vllm"), parts, size, "reward.judge")
    assert "rollout" not in str(caught.value)


def metrics(folder, name, settings):
    words = [word for each in (f"run.name={name}", *settings) for word in ("--set", each)]
    command = [sys.executable, "-m", "engine_core.cli.main", "train", "run.toml", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def write_inputs(folder):
    write_model(folder / "model", {"head_dim": 32}, 0, tied=True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN)


def test_a_dry_run_refuses_a_pool_that_cannot_have_the_sampler(engine, tmp_path):
    write_inputs(tmp_path)
    refused = engine("train", "run.toml", "--dry-run")
    assert refused.code == 2
    assert (
        "run.toml:9: rollout.backend = 'vllm' runs in one process, and the sampler's pool has 2."
        in refused.err
    )
    assert engine("plan", "run.toml", "--memory", "24").err == refused.err
    for settings in (*APART, *CUT, "runtime.torchrun.processes=1"):
        assert engine("train", "run.toml", "--dry-run", "--set", settings).code == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_cut_over_the_trainers_processes_samples_as_whole_ones_do(tmp_path):
    write_inputs(tmp_path)
    whole, cut = (metrics(tmp_path, name, how) for name, how in (("whole", APART), ("cut", CUT)))
    assert len(cut) == 3
    for one, two in zip(whole, cut, strict=True):
        assert two["mismatch/max_abs"] < 1e-4  # every update reached every part
        for name in ("rollouts", "reward/mean", "tokens/generated"):
            assert two[name] == one[name]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
