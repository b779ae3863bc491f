"""One run file, one word changed: the first step of every train backend has the same loss and gradient norm."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.testing import reference

RUNS = {
    "rl": """
[rollout]
group_size = 4
max_response_tokens = 8
[[reward]]
name = "numeric"
""",
    "sft": 'trainer = "sft"\n',
}
SHARED = """
[model]
path = "model"
[actor]
max_tokens_per_rank = 128
[actor.optim]
lr = 1e-3
[data]
train = "train.jsonl"
prompts_per_step = 4
[run]
steps = 1
"""
TWO = ["runtime.backend=torchrun", "runtime.torchrun.processes=2"]
BACKENDS = {
    "torch": [],
    "fsdp": TWO,
    "deepspeed": [*TWO, "actor.deepspeed.param_persistence_threshold=0"],
}
SHIM = Path(__file__).parents[2] / "plugins" / "megatron" / "tests"  # with what answers for CUDA on a CPU
SHIMMED = ("on_cpu.py", "cpu_shim.py")
if (SHIM / SHIMMED[0]).is_file():
    BACKENDS["megatron"] = [*TWO, 'plugins=["on_cpu.py"]', "actor.megatron.tp=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("agree")
    reference.write_model(made / "model", {}, 0, True)
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)}
        for a in range(6)
        for b in range(6)
    ]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in SHIMMED if "megatron" in BACKENDS else ():
        shutil.copy(SHIM / name, made)
    for name, own in RUNS.items():
        head, _, rest = own.partition("[") if name == "rl" else (own, "", "")
        (made / f"{name}.toml").write_text(head + SHARED + (f"[{rest}" if rest else ""))
    return made


def first_step(folder, run, backend):
    settings = [f"run.name={run}-{backend}", f"actor.backend={backend}", *BACKENDS[backend]]
    command = [sys.executable, "-m", "engine_core.cli.main", "train", f"{run}.toml"]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "runs" / f"{run}-{backend}" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_first_step_is_the_same_under_every_backend(folder, run):
    expected = first_step(folder, run, "torch")
    assert expected["actor/grad_norm"] > 1e-3
    for backend in list(BACKENDS)[1:]:
        found = first_step(folder, run, backend)
        for name in ("actor/loss", "actor/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (backend, name)
