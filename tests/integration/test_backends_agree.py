"""One run file, one word changed: every train backend takes the same first step, and goes on with what another exported."""

import itertools
import json
import subprocess
import sys

import pytest

from engine_plugin_testing import reference

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
    "megatron": [*TWO, "actor.megatron.cpu_emulation=true", "actor.megatron.tp=2"],
}


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
    for name, own in RUNS.items():
        head, _, rest = own.partition("[") if name == "rl" else (own, "", "")
        (made / f"{name}.toml").write_text(head + SHARED + (f"[{rest}" if rest else ""))
    return made


def engine(folder, *arguments):
    command = [sys.executable, "-m", "engine_core.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def train(folder, run, name, backend, *more):
    """The metrics of each step."""
    settings = [f"run.name={name}", f"actor.backend={backend}", *BACKENDS[backend], *more]
    engine(folder, "train", f"{run}.toml", *(word for setting in settings for word in ("--set", setting)))
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def first_step(folder, run, backend):
    return train(folder, run, f"{run}-{backend}", backend)[0]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_first_step_is_the_same_under_every_backend(folder, run):
    expected = first_step(folder, run, "torch")
    assert expected["actor/grad_norm"] > 1e-3
    for backend in list(BACKENDS)[1:]:
        found = first_step(folder, run, backend)
        for name in ("actor/loss", "actor/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (backend, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_one_backend_exports_go_on_under_the_next_with_the_loss_that_it_would_have_had(folder):
    """All steps see one batch. The fourth step of a run is on live weights, the first of the next on the exported third."""
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "batch.jsonl").write_text("".join(rows[:4]))
    words = ["data.train=batch.jsonl", "run.steps=4", "checkpoint.every_steps=3"]
    model, expected, began = "model", None, []
    for number, backend in enumerate([*BACKENDS, "torch"]):
        name = f"leg-{number}-{backend}"
        losses = [
            line["actor/loss"] for line in train(folder, "sft", name, backend, *words, f"model.path={model}")
        ]
        assert expected is None or losses[0] == pytest.approx(expected, abs=1e-5), name
        began.append(losses[0])
        if number == len(BACKENDS):
            break
        expected, model = losses[3], f"after-{name}"
        engine(folder, "export", f"runs/{name}", model, "--step", "3")
    assert all(later < earlier - 1e-3 for earlier, later in itertools.pairwise(began)), began
