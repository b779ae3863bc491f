r"""``engine eval --suite``: models, run files and runs on copies of public sets, with scores counted by hand."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import hub_folders
import pytest

from engine_core.config import ModelConfig
from engine_core.data.tokenizer import end_tokens
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_tools.commands.evaluate import print_metrics

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GSM8K = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
ANSWERED = [  # the responses to 20 questions whose answer is 72: the number behind ####, the last number
    *[("9 * 8 = 72\n#### 72", True, True)] * 4,
    ("#### 72.", True, True),
    ("#### 72 eggs", True, True),
    ("#### 71\n#### 72", True, True),
    *[("so 72", False, True)] * 3,
    ("#### $72", False, True),
    (r"\boxed{72}", False, True),
    *[("#### 71", False, False)] * 3,
    ("72 = 9 * 8", False, False),
    ("#### 7 2", False, False),
    ("no idea", False, False),
    *[("", False, False)] * 2,
]
SCRIPTED = '''
"""A sampler that answers prompt number i with line i of a file."""

import json
from pathlib import Path

import torch

from engine_core import hookimpl
from engine_core.contracts.engines import RolloutEngine
from engine_core.specs import RolloutBackend
from engine_core.types import Rollout

ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())


class Scripted(RolloutEngine):
    num_unfinished = 0
    queue = ()

    def add(self, requests):
        self.queue = list(requests)

    def step(self):
        done, self.queue = [self.answer(request) for request in self.queue], []
        return done

    def answer(self, request):
        text = ANSWERS[request.group_id]
        ids = [*request.prompt.token_ids, *[5] * len(text), 1]
        mask = torch.arange(len(ids)) >= len(request.prompt.token_ids)
        return Rollout(
            request_id=request.id, prompt=request.prompt, token_ids=torch.tensor(ids), loss_mask=mask,
            rollout_log_probs=0.0 * mask, policy_versions=0 * mask.int(), group_id=request.group_id,
            index=request.index, text=text, finish_reason="length" if text == "no idea" else "stop",
        )

    def abort(self, ids):
        return []

    def update_weights(self, stream, version):
        raise AssertionError("a model folder needs no train engine")


@hookimpl
def engine_rollout_engines():
    return {"scripted": RolloutBackend(load=Scripted)}
'''


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def gsm8k_folder(folder: Path) -> Path:
    """Write 6 training rows and 20 questions whose answer is 72, as the hub repository has them."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(GSM8K)
    solutions = [f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}" for i in range(6)]
    train = [{"question": f"Twice {i}?", "answer": solution} for i, solution in enumerate(solutions)]
    (folder / "train.jsonl").write_text(jsonl(train))
    test = [{"question": f"Eggs of {i} hens?", "answer": "9 * 8 = 72\n#### 72"} for i in range(20)]
    (folder / "test.jsonl").write_text(jsonl(test))
    return folder


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Settings that replace the sampler by the responses of ``ANSWERED``; a folder with the questions."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    (tmp_path / "answers.json").write_text(json.dumps([text for text, *_ in ANSWERED]))
    gsm8k_folder(tmp_path / "gsm8k")
    sets = [
        "plugins=['scripted.py']",
        "rollout.backend=scripted",
        "model.override.max_position_embeddings=4096",
    ]
    return [word for entry in sets for word in ("--set", entry)]


def test_a_model_folder_is_scored_as_counted_by_hand(engine, tiny_model, scripted, tmp_path, caplog):
    caplog.set_level("INFO", "engine")
    answer = engine(
        "eval", tiny_model, "--suite", "gsm8k", "--source", "gsm8k", "--out", "scores", "--json", *scripted
    )
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)["gsm8k"]

    strict, last = (sum(row[column] for row in ANSWERED) for column in (1, 2))
    assert (strict, last) == (7, 12)
    assert (found["accuracy"], found["gsm8k"], found["numeric"]) == (7 / 20, 7 / 20, 12 / 20)
    assert found["accuracy_low"] < 7 / 20 < found["accuracy_high"]
    assert (found["prompts"], found["truncated_share"], found["unscored"]) == (20, 1 / 20, 0)
    assert found["response_length"] == pytest.approx(sum(len(text) + 1 for text, *_ in ANSWERED) / 20)
    assert found["protocol"]["follows"].startswith("verl")
    assert json.loads((tmp_path / "scores" / "suites.json").read_text())["gsm8k"] == found
    rollouts = read_rollouts(tmp_path / "scores" / "gsm8k.parquet")
    assert [r.rewards["gsm8k"] for r in rollouts] == [float(strict) for _, strict, _ in ANSWERED]
    assert rollouts[0].prompt.text == (
        'Eggs of 0 hens? Let\'s think step by step and output the final answer after "####".'
    )
    built = [record.message for record in caplog.records if record.message.startswith("Building the role")]
    assert built == ["Building the role rollout."]  # no train engine


def test_the_mix_of_a_run_whose_files_are_gone_is_not_read(engine, rl_run, scripted, tmp_path):
    parts = [f'{{ path = "{name}.jsonl", weight = 1 }}' for name in ("gone", "gone-too")]
    mixed = f'extends = ["rl.toml"]\n[data]\ntrain = []\nmix = [{", ".join(parts)}]\n'
    (tmp_path / "mixed.toml").write_text(mixed)
    answer = engine("eval", "mixed.toml", "--suite", "gsm8k", "--source", "gsm8k", "--json", *scripted)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["gsm8k"]["accuracy"] == 7 / 20


def test_the_result_is_printed_with_its_protocol_and_what_is_not_comparable(engine, tiny_model, scripted):
    first = ["--set", "eval.set.gsm8k_5shot.max_prompts=10"]
    answer = engine(
        "eval", tiny_model, "--suite", "gsm8k,gsm8k_5shot", "--source", "gsm8k", *first, *scripted
    )
    assert answer.code == 0, answer.err
    zero, five = answer.out.split("\n\n")

    assert zero.startswith("gsm8k: 20 prompts, zero-shot, plain text, greedy, at most 1024 tokens\n")
    assert re.search(
        r"^  accuracy +0\.350  \[0\.1\d\d, 0\.5\d\d\]  the number after the last ####$", zero, re.M
    )
    assert re.search(r"^  numeric +0\.600  the last number of the response$", zero, re.M)
    assert re.search(r"^  length +\d+ tokens, 5\.0% cut at the limit$", zero, re.M)
    assert re.search(r"^  time +\d+ s$", zero, re.M)
    assert re.search(r"^  follows +verl, .* \(https://github\.com/volcengine/verl/", zero, re.M)
    assert re.search(r"^  differs +a period after the number is ignored$", zero, re.M)
    assert re.search(r"^  changed +the tokenizer has no chat template: plain text$", zero, re.M)
    assert "max_prompts" not in zero
    assert five.startswith(
        "gsm8k_5shot: 10 prompts, 5-shot, plain text, greedy, at most 256 tokens, until 'Question:' or"
    )
    assert re.search(r"^  accuracy +0\.700 ", five, re.M)  # 7 of the first 10
    assert [line for line in five.splitlines() if line.startswith("  changed")] == [
        "  changed   eval.set.gsm8k_5shot.max_prompts=10"
    ]


def test_a_five_shot_prompt_is_that_of_lm_evaluation_harness(engine, tiny_model, scripted, tmp_path):
    words = ["--suite", "gsm8k_5shot", "--source", "gsm8k", "--out", "scores"]
    assert engine("eval", tiny_model, *words, *scripted).code == 0

    prompt = read_rollouts(tmp_path / "scores" / "gsm8k_5shot.parquet")[3].prompt
    assert (
        prompt.text
        == """\
Question: Twice 0?
Answer: 0 + 0 = <<0+0=0>>0
#### 0

Question: Twice 1?
Answer: 1 + 1 = <<1+1=2>>2
#### 2

Question: Twice 2?
Answer: 2 + 2 = <<2+2=4>>4
#### 4

Question: Twice 3?
Answer: 3 + 3 = <<3+3=6>>6
#### 6

Question: Twice 4?
Answer: 4 + 4 = <<4+4=8>>8
#### 8

Question: Eggs of 3 hens?
Answer:"""
    )


def test_a_chat_model_gets_its_template_with_the_arguments_of_the_run_file(
    engine, tiny_model, scripted, tmp_path
):
    shutil.copytree(tiny_model, tmp_path / "chat")
    template = (
        "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    run = '[model]\npath = "chat"\n[data]\nsystem = "of the run"\nchat_template_kwargs = { enable_thinking = false }\n'
    (tmp_path / "run.toml").write_text(run)
    words = ["--suite", "gsm8k,gsm8k_5shot", "--source", "gsm8k", "--out", "scores", "--json"]
    answer = engine("eval", "run.toml", *words, *scripted)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)

    prompt = read_rollouts(tmp_path / "scores" / "gsm8k.parquet")[0].prompt
    assert prompt.text == (
        '[False]<user>Eggs of 0 hens? Let\'s think step by step and output the final answer after "####".<assistant>'
    )
    assert found["gsm8k"]["protocol"]["changed"] == [
        'arguments of the chat template: {"enable_thinking": false}'
    ]
    assert found["gsm8k_5shot"]["protocol"]["changed"] == []
    assert found["gsm8k"]["protocol"]["measured"].startswith("zero-shot, chat template, ")
    plain = read_rollouts(tmp_path / "scores" / "gsm8k_5shot.parquet")[0].prompt
    assert plain.text.startswith("Question: Twice 0?")


# ------------------------------------------------------------------ real weights

RUN = """\
trainer = "sft"
[model]
path = "{model}"
override = {{ max_position_embeddings = 512 }}
[data]
train = "rows.jsonl"
prompts_per_step = 8
[data.columns]
prompt = "asked"
[actor.optim]
lr = 0.02
[eval]
max_prompts = 1
[run]
name = "first"
steps = 40
[tracking]
trackers = []
"""


@pytest.fixture
def taught(engine, tiny_model, tmp_path, monkeypatch):
    """A supervised run that has learned to answer every problem of a copy of MATH-500 with "it is 4"."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    problems = [
        {"problem": f"Find {i} + 2.", "solution": "", "answer": str(i % 5), "subject": "a", "level": 1}
        for i in range(20)
    ]
    (tmp_path / "math500").mkdir()
    (tmp_path / "math500" / "test.jsonl").write_text(
        jsonl({**row, "unique_id": str(i)} for i, row in enumerate(problems))
    )
    rows = [{"asked": f"{row['problem']}{BOXED}", "response": "it is 4"} for row in problems]
    (tmp_path / "rows.jsonl").write_text(jsonl(rows))
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_model))
    answer = engine("train", "run.toml")
    assert answer.code == 0, answer.err
    return ["--suite", "math500", "--source", "math500", "--set", "eval.set.math500.max_response_tokens=16"]


def test_a_response_ends_at_the_end_tokens_of_the_model_unless_others_are_set(
    engine, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    gsm8k_folder(tmp_path / "gsm8k")
    shutil.copytree(tiny_model, tmp_path / "model")
    size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    changed = {
        "model.override.max_position_embeddings": 4096,
        "eval.set.gsm8k.max_response_tokens": 8,
        "eval.set.gsm8k.max_prompts": 2,
    }
    sets = [f"--set={key}={value}" for key, value in changed.items()]

    def length(*more):
        answer = engine("eval", "model", "--suite", "gsm8k", "--source", "gsm8k", "--json", *sets, *more)
        assert answer.code == 0, answer.err
        return json.loads(answer.out)["gsm8k"]["response_length"]

    assert length() == 8  # without generation_config.json
    written = tmp_path / "model" / "generation_config.json"
    written.write_text(json.dumps({"eos_token_id": list(range(size))}))
    assert length() == 1
    assert length("--set=rollout.stop_token_ids=[1]") == 8


@pytest.mark.parametrize(("ends", "ids"), [([1, 106], (1, 106)), (106, (106,)), (None, ())])
def test_a_model_names_one_end_token_or_several_or_none(tmp_path, ends, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert end_tokens(ModelConfig(path=str(tmp_path))) == ids


def test_the_checkpoint_of_a_trainer_that_samples_nothing_is_scored(engine, taught, tmp_path):
    own = ["--set", "rollout.weights=own"]  # so that the actor's weights must be sent
    answer = engine("eval", "first", *taught, *own, "--out", "after", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)["math500"]

    assert {r.text for r in read_rollouts(tmp_path / "after" / "math500.parquet")} == {"it is 4"}
    assert (found["prompts"], found["accuracy"]) == (20, 4 / 20)  # the answer to every fifth is 4

    untrained = engine("eval", "run.toml", *taught, "--out", "before", "--json")
    assert untrained.code == 0, untrained.err
    assert json.loads(untrained.out)["math500"]["accuracy"] == 0
    compared = json.loads(engine("compare", "after", "before", "--json").out)["math500"]
    assert compared["difference"]["mean"] == pytest.approx(0.2)
    assert compared["difference"]["prompts"] == 20


# ------------------------------------------------------------------ every suite, and mistakes


def test_every_suite_reads_its_set_and_samples_as_its_protocol_says(
    engine, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    (tmp_path / "answers.json").write_text(json.dumps([r"so \boxed{25}"] * 10 + [r"\boxed{22}"] * 10))
    for name in ("gsm8k", "math", "math500", "aime24", "aime25"):
        hub_folders.write(name, tmp_path / "hub" / name)
    sets = [
        "plugins=['scripted.py']",
        "rollout.backend=scripted",
        "model.override.max_position_embeddings=40000",
    ]
    words = [word for entry in sets for word in ("--set", entry)]
    suites = "gsm8k,gsm8k_5shot,math500,math,aime24,aime25"
    answer = engine(
        "eval", tiny_model, "--suite", suites, "--source", "hub", "--out", "scores", "--json", *words
    )
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)

    assert list(found) == suites.split(",")
    assert all(each["prompts"] == 20 for each in found.values())
    counts = {name: len(read_rollouts(tmp_path / "scores" / f"{name}.parquet")) for name in found}
    assert counts == {"gsm8k": 20, "gsm8k_5shot": 20, "math500": 20, "math": 20, "aime24": 640, "aime25": 640}
    shown = found["aime24"]["protocol"]["measured"]
    assert shown == "zero-shot, plain text, 32 responses at temperature 0.6, top_p 0.95, at most 32768 tokens"
    assert "math" not in found["gsm8k"]
    assert "numeric" not in found["math500"]
    right = {name: each["accuracy"] for name, each in found.items() if each["accuracy"]}
    assert right == {"aime24": 1 / 20, "aime25": 1 / 20}  # problem 1 has the answer 25, problem 19 has 022


MISTAKES = [
    ("eval model --suite gsm8", 2, "--suite: unknown suite 'gsm8'. Did you mean 'gsm8k'? Known: aime24,"),
    ("eval model --suite ,", 2, "--suite: expected a name. Known: aime24,"),
    ("eval model", 2, "'model' is a model: name what to measure, --suite NAME (gsm8k,"),
    ("eval model --suite gsm8k --source gone", 2, "--source: there is no folder 'gone'."),
    ("eval model --suite gsm8k,math --source hub", 2, "--source: there is no folder 'hub/math'."),
    ("eval run.toml --source hub", 2, "--source: names the rows of a suite. Add --suite NAME"),
    ("eval model --suite gsm8k --source hub --step 3", 2, "--step: 'model' is no run, and only a run has"),
    ("eval frist --suite gsm8k", 4, "No run at 'frist'"),
    ("eval model --suite gsm8k --source hub --set eval.set.gsm8k.gsm8k.shot=1", 2, "Did you mean 'shots'?"),
    ("eval model --suite gsm8k --source hub --set data.chat_template=1", 2, "data.chat_template"),
    ("eval model --suite gsm8k --source empty", 4, "the split 'test' of folder"),
    ("train evaluate.toml", 2, "trainer = 'evaluate' trains nothing. Measure with: engine eval FILE."),
    (
        "train --dry-run evaluate.toml",
        2,
        "trainer = 'evaluate' trains nothing. Measure with: engine eval FILE.",
    ),
]


@pytest.mark.parametrize(("words", "code", "message"), MISTAKES)
def test_a_mistake_is_named_before_a_model_is_loaded(
    engine, tiny_model, sft_run, tmp_path, monkeypatch, words, code, message
):
    def built(*arguments, **options):
        raise AssertionError("a model was built")

    monkeypatch.setattr("engine_core.local.engine_host.EngineHost.__init__", built)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hub").mkdir()
    gsm8k_folder(tmp_path / "hub" / "gsm8k")
    text = sft_run.read_text().replace('trainer = "sft"', 'trainer = "evaluate"')
    (tmp_path / "rows.jsonl").write_text(jsonl([{"prompt": "1+1=", "answer": "2"}]))
    (tmp_path / "evaluate.toml").write_text(text + '[[reward]]\nname = "numeric"\n')
    answer = engine(*words.split())
    assert (answer.code, message in answer.err) == (code, True), answer.err


def test_a_run_file_that_only_evaluates_samples_no_training_rows(engine, rl_run, tmp_path):
    words = ["--set", "trainer=evaluate"]
    scored = engine("eval", "rl.toml", "--json", *words)
    assert scored.code == 0, scored.err
    assert json.loads(scored.out)["eval/prompts"] == 2
    refused = engine("generate", "rl.toml", "out.parquet", *words)
    assert refused.code == 2
    assert "reads no training rows. Sample with: engine eval FILE --out DIR." in refused.err


def test_metrics_are_sorted_with_six_digits(capsys):
    print_metrics({"b": 2.0, "a": 0.123456789}, as_json=False)
    assert capsys.readouterr().out == "a  0.123457\nb  2\n"
