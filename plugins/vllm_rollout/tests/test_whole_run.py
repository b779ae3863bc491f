"""The examples of the page on served models, trained by ``engine train`` with a real vLLM, and other frozen models in their place."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine_core.config.rewards import JudgeConfig
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_rewards.models.judge import VerdictReader
from engine_plugin_testing.reference import LETTERS, write_model

PAGE = Path(__file__).parents[3] / "docs" / "served_models.md"
# case is left aside
VERDICTS = {letter: i / len(LETTERS) for i, letter in enumerate(LETTERS) if not letter.isupper()}
SMALL = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}
NOTED = """
import json, os
from pathlib import Path
from engine_core import hookimpl
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_vllm_rollout.engine import VLLMRolloutEngine
from engine_plugin_vllm_rollout.frozen import VLLMFrozenEngine


def note(engine, method):
    with Path(__file__).with_name("noted.jsonl").open("a") as file:
        file.write(json.dumps([os.getpid(), engine.context.role, method]) + "\\n")


def noted(made, method):
    whole = getattr(made, method)

    def call(self, *given, **named):
        if method != "sleep":
            note(self, method)
        found = whole(self, *given, **named)
        if method == "sleep":
            note(self, method)
        return found

    setattr(made, method, call)


for made, methods in {
    TorchEngine: ["forward_backward"],
    VLLMRolloutEngine: ["add", "sleep", "wake"],
    VLLMFrozenEngine: ["infer", "sleep", "wake"],
}.items():
    for method in methods:
        noted(made, method)


@hookimpl
def engine_on_event(event, data):
    pass
"""
CLASSIFIER = """
[[reward]]
name = "quality"
[reward.model]
path = "scorer"
backend = "vllm"
[reward.model.vllm]
dtype = "float32"
enforce_eager = true
"""
JUDGE = """
[[reward]]
name = "quality"
[reward.judge]
path = "model"
backend = "vllm"
prompt = "{question} {completion} Is it {answer}? "
max_response_tokens = 8
[reward.judge.vllm]
dtype = "float32"
enforce_eager = true
"""
VERDICT = """
[[reward]]
name = "quality"
[reward.verdict]
path = "model"
backend = "vllm_server"
prompt = "{question} {completion} Is it {answer}? "
verdicts = { 1 = 1.0, 0 = 0.0 }
[reward.verdict.vllm_server]
token_env = "SERVED_TOKEN"
"""
DISTILL = """
trainer = "distill"
[model]
path = "model"
[teacher]
path = "teacher"
backend = "vllm"
[teacher.vllm]
dtype = "float32"
enforce_eager = true
max_num_seqs = 16
kv_cache_memory_bytes = 67108864
[actor.optim]
lr = 3e-3
[rollout]
group_size = 4
max_response_tokens = 6
[distill]
top_k = 16
[data]
train = "data/train.jsonl"
prompts_per_step = 4
[run]
steps = 6
[runtime]
backend = "torchrun"
[placement]
pools = { train = 1, frozen = 1 }
actor = "train"
rollout = "train"
teacher = "frozen"
"""


@pytest.fixture
def folder(tmp_path):
    """The page's run files, and the models and data that they name."""
    for file, run in re.findall(r"^```toml (\w+\.toml)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S):
        (tmp_path / file).write_text(run)
    (tmp_path / "noted.py").write_text(NOTED)
    write_model(tmp_path / "model", {"head_dim": 32}, 0, tied=True)
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(16)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def train(folder, settings, file="apart.toml"):
    """The metrics of each step."""
    settings = {"plugins": ["noted.py"], "run.name": "r", **settings}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={toml(value)}")]
    command = [sys.executable, "-m", "engine_core.cli.main", "train", file, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        json.loads(line)
        for line in (folder / "runs" / settings["run.name"] / "metrics.jsonl").read_text().splitlines()
    ]


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def replace_the_reward(folder, reward):
    run = (folder / "served.toml").read_text()
    (folder / "served.toml").write_text(run[: run.index("[[reward]]")] + reward)


def rollouts_of(folder):
    files = sorted((folder / "runs" / "r" / "rollouts").glob("*.parquet"))
    return [rollout for file in files for rollout in read_rollouts(file)]


def check_sleep(folder, role, asks, steps):
    """In another process than the actor's; awake when it is asked, asleep whenever the actor learns."""
    events = [json.loads(line) for line in (folder / "noted.jsonl").read_text().splitlines()]
    asleep, asked, learned, pids = False, 0, 0, {}
    for pid, of, method in events:
        pids.setdefault(of, set()).add(pid)
        if of == role and method in ("sleep", "wake"):
            asleep = method == "sleep"
        elif of == role:
            assert (method, asleep) == (asks, False)
            asked += 1
        else:
            assert (of, method, asleep) == ("actor", "forward_backward", True)
            learned += 1
    assert len(pids[role]) == len(pids["actor"]) == 1
    assert not pids[role] & pids["actor"]
    assert asked >= steps
    assert learned >= steps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_judge_sleeps_in_its_own_process_while_the_actor_learns(folder):
    replace_the_reward(folder, JUDGE)
    judge = {"pattern": "(?s).", "verdicts": VERDICTS, "vllm": SMALL}
    lines = train(folder, {f"reward.quality.judge.{key}": value for key, value in judge.items()})
    check_sleep(folder, "judge", "add", steps=2)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["actor/grad_norm"] > 0
    rollouts = rollouts_of(folder)
    assert len(rollouts) == 2 * 4 * 4
    path = folder / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    reader = VerdictReader(
        JudgeConfig(path=str(path), prompt="{completion}", pattern="(?s).", verdicts=VERDICTS)
    )
    found = []
    for rollout in rollouts:
        asked = f"{rollout.prompt.text} {rollout.text} Is it {rollout.prompt.columns['answer']}? "
        ids = tokenizer(asked, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        value = reader.read(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
        assert rollout.reward == (0.0 if value is None else value)
        found.append(value)
    assert len(set(found)) > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_actor_learns_what_a_classifier_of_vllm_in_its_own_process_scores(folder):
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scorer")
    replace_the_reward(folder, CLASSIFIER)
    settings = {"run.steps": 10, "data.prompts_per_step": 8, "actor.optim.lr": 1e-2}
    lines = train(folder, settings | {"reward.quality.model.vllm": SMALL})
    check_sleep(folder, "reward_model", "infer", steps=10)
    scores = [line["reward/quality"] for line in lines]
    assert sum(scores[-3:]) > sum(scores[:3]) + 0.3
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer").eval()
    end = model.config.eos_token_id
    for rollout in rollouts_of(folder)[::16]:
        ids = rollout.token_ids.tolist()
        ids += [] if ids[-1] == end else [end]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
        assert rollout.reward == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn: what a server needs")
def test_two_ranks_that_share_the_actor_ask_one_server_for_verdicts_each_about_its_share(
    folder, monkeypatch, served
):
    token = "s3cr3t-of-the-test"
    monkeypatch.setenv("SERVED_TOKEN", token)
    replace_the_reward(folder, VERDICT)
    run = (folder / "apart.toml").read_text().replace('"frozen"', '"train"')
    (folder / "apart.toml").write_text(run.replace("{ train = 1, frozen = 1 }", "{ train = 2 }"))
    with served(folder / "model", token, "--max-logprobs=-1") as at:
        url = {"reward.quality.verdict.vllm_server.url": at}
        lines = train(folder, url | {"actor.backend": "fsdp", "ref.backend": "fsdp"})
    assert [line["step"] for line in lines] == [1, 2]
    path = folder / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    places = [tokenizer.convert_tokens_to_ids(digit) for digit in "10"]
    rollouts = rollouts_of(folder)
    assert len(rollouts) == 2 * 4 * 4
    for rollout in rollouts:
        asked = f"{rollout.prompt.text} {rollout.text} Is it {rollout.prompt.columns['answer']}? "
        with torch.no_grad():
            logits = model(input_ids=tokenizer(asked, return_tensors="pt")["input_ids"]).logits[0, -1]
        p = logits.softmax(-1)[places]
        assert rollout.reward == pytest.approx((p[0] / p.sum()).item(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_teacher_run_by_vllm_in_its_own_process_teaches_what_one_of_the_torch_engine_does(folder):
    write_model(folder / "teacher", {"head_dim": 32}, 7, tied=True)
    (folder / "distill.toml").write_text(DISTILL)
    ours, reference = (
        train(folder, {"plugins": [], "run.name": name, "teacher.backend": name}, "distill.toml")
        for name in ("vllm", "torch")
    )
    assert len(ours) == len(reference) == 6
    for one, two in zip(ours, reference, strict=True):
        for name in ("actor/loss", "actor/grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-4), (one["step"], name)
    assert ours[-1]["actor/loss"] < ours[0]["actor/loss"] - 0.05
