"""The model card of an export: valid metadata, what it shows, what it leaves out, what it must not show."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id
from pyarrow import parquet

from engine_core import load_config
from engine_core.cli.loading import read_run
from engine_core.config import EngineConfig
from engine_core.runs.rollout_files import write_rollouts
from engine_core.runs.tracking import RunFolder
from engine_core.types import Prompt, Rollout
from engine_plugin_tools.model_card import fetch_base_card, public, rename_card, write_card

EVALUATED = {
    "eval/accuracy": 0.8301,
    "eval/accuracy_low": 0.79,
    "eval/accuracy_high": 0.87,
    "eval/pass@4": 0.95,
    "eval/numeric": 0.83,
    "eval/response_length": 12.0,
    "eval/prompts": 400.0,
    "eval/unscored": 0.0,
    "eval/hard/accuracy": 0.25,
    "eval/hard/prompts": 20.0,
}
LINES = [
    {"step": 0, "eval/accuracy": 0.5, "eval/numeric": 0.5},
    *(
        {"step": step, "time": 1767322245.0, "time/step": 30.0, "tokens/total": 1000.0, "reward/mean": step / 4}
        for step in (1, 2)
    ),
]  # fmt: skip
LINES[-1] |= EVALUATED
SOURCES = [
    {
        "name": "gsm8k",
        "license": "MIT",
        "revision": "abc",
        "url": "https://huggingface.co/datasets/openai/gsm8k",
    },
    {"name": "math", "license": "CC0-1.0", "revision": "", "url": "https://example.org/math"},
    {
        "name": "math500",
        "license": "MIT",
        "revision": "def",
        "url": "https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
    },
]
SETTINGS = {
    "model": {"path": "org/base-1b"},
    "actor": {},
    "reward": [{"name": "numeric"}],
    "data": {"train": "/home/alice/secret-project/train.jsonl", "validation": "/home/alice/held.jsonl"},
    "rollout": {"max_response_tokens": 64},
    "eval": {
        "temperature": 0.6,
        "samples_per_prompt": 4,
        "k": [4],
        "set": [
            {"name": "hard", "path": "/data/a.jsonl", "temperature": 0.0, "samples_per_prompt": 1, "k": []}
        ],
    },
}


@pytest.fixture
def make(tmp_path):
    """``make(lines=..., environment=..., **settings)``: an exported folder, and the run that it is from."""

    def make_run(lines=LINES, environment=None, files=None, **settings):
        config = EngineConfig(**{**SETTINGS, **settings}, run={"dir": str(tmp_path / "runs"), "name": "math"})
        run = RunFolder.create(config)
        run.close()
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if environment is not None:
            known = json.loads((run.path / "env.json").read_text())
            (run.path / "env.json").write_text(json.dumps({**known, **environment}))
        folder = tmp_path / "out"
        folder.mkdir()
        for name, value in (files or {"config.json": {"architectures": ["Qwen3ForCausalLM"]}}).items():
            (folder / name).write_text(json.dumps(value))
        return folder, run, config

    return make_run


def card_of(folder, run, config, step=2, **more) -> ModelCard:
    card = ModelCard.load(write_card(folder, run, config, step, **more))
    assert "None" not in card.text
    assert not re.search(r"\n\n\n|[{}]%|{{", card.text)
    return card


def test_the_metadata_are_what_the_hub_reads(make):
    folder, run, config = make()
    card = card_of(folder, run, config, name="me/math")
    data = card.data.to_dict()
    index = data.pop("model-index")
    assert data == {
        "base_model": "org/base-1b",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["engine", "rl", "grpo", "ppo_clip"],
    }
    assert metadata_load(folder / "README.md") == {**data, "model-index": index}
    assert ModelCard(str(card)).data.eval_results == card.data.eval_results
    found = {(r.dataset_type, r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("validation", "held.jsonl", "accuracy"): 0.8301,
        ("validation", "held.jsonl", "pass@4"): 0.95,
        ("validation", "held.jsonl", "numeric"): 0.83,
        ("hard", "a.jsonl", "accuracy"): 0.25,
    }
    assert card.data.model_name == "me/math"
    validate_repo_id(card.data.base_model)


def test_the_text_says_what_the_model_is_and_what_was_measured(make):
    folder, run, config = make()
    text = card_of(folder, run, config, name="me/math").text
    assert (
        "A language model trained from [org/base-1b](https://huggingface.co/org/base-1b) on `train.jsonl` with Engine: "
        "2 steps of the trainer `rl` (`grpo`, `ppo_clip`), reward `numeric`." in text
    )
    assert "measured after step 2. Intervals are 95%, over prompts." in text
    rows = [
        "| set | metric | before training | value | interval |",
        "| validation | accuracy | 0.5 | 0.8301 | [0.79, 0.87] |",
        "| validation | pass@4 |  | 0.95 |  |",
        "| hard | accuracy |  | 0.25 |  |",
        "| date | 2026-01-02 |",
        "| steps | 2 |",
        "| mean reward, last tenth of the steps | 0.500 |",
        "| time in steps | 1m00s |",
        "| tokens in updates | 2,000 |",
        "| seeds | run 0, model 0 |",
    ]
    assert [row for row in rows if row not in text.splitlines()] == []
    validation = "400 prompts, 4 responses each, temperature 0.6, at most 64 tokens, scored by `numeric`"
    assert f"- `validation`: `held.jsonl`, {validation}\n" in text
    assert "- `hard`: `a.jsonl`, 20 prompts, 1 response each, greedy, at most 64 tokens" in text
    assert "one run with one seed" in text
    assert re.search(r"\| versions \| engine-core-rl [\d.]+, torch 2", text)
    assert "![Learning curves of the run](curves.png)" in text
    assert (folder / "curves.png").read_bytes()[1:4] == b"PNG"


def test_nothing_tells_where_the_run_was(make, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-in-the-environment")
    model = {"path": "/home/alice/models/planted-in-the-environment"}
    folder, run, config = make(model=model)
    run.config_file.write_text(
        f'{run.config_file.read_text()}\n[plugin.judge]\napi_key = "planted-in-the-file"\n'
    )
    text = str(card_of(folder, run, config))
    environment = json.loads((run.path / "env.json").read_text())
    planted = ("planted-in-the-environment", "planted-in-the-file")
    for hidden in ("alice", "secret-project", str(tmp_path), environment["host"], *planted):
        assert not re.search(rf"\b{re.escape(hidden)}\b", text), hidden
    run_file = re.search(r"````toml\n(.*)````", text, re.DOTALL)[1]
    shown = tomllib.loads(run_file)
    assert (shown["data"]["train"], shown["plugin"]["judge"]["api_key"]) == ("train.jsonl", "[redacted]")


def test_paths_and_private_addresses_in_a_run_file_become_names():
    shown = {
        '"/home/alice/My Models/base"': '"base"',
        '"/home/alice/x/"': '"x"',
        '"look at /srv/a/b.txt, please"': '"look at b.txt, please"',
        '"http://10.1.2.3:8000/v1"': '"[private address]"',
        '"http://judge:8000/v1"': '"[private address]"',
        '"http://[::1]:80/"': '"[private address]"',
        '"10.1.2.3:6379"': '"[private address]"',
        '"10.1.2.3"': '"[private address]"',
        '"ray://10.1.2.3:10001"': '"[private address]"',
        '"head.corp.internal:6379"': '"[private address]"',
        '"from head.corp.internal, 10.1.2.3 and [fe80::1]:80."': '"from [private address], [private address] and [private address]."',
        '"judge.example.com:8000"': '"[private address]"',
        '"tcp://gpu7:29500"': '"[private address]"',
        '"gpu6:29500,gpu7:29500"': '"[private address],[private address]"',
        '"file:///home/alice/x"': '"[private address]"',
        '"https://alice@example.com/x"': '"[private address]"',
        '"https://10.1.2.3/x"': '"[private address]"',
        '"https://head.corp.internal/x"': '"[private address]"',
        '"a\\n/home/alice/x\\n10.1.2.3"': '"a\\nx\\n[private address]"',
        '"/home/alice"': '"home"',
        '"/Users/alice/"': '"home"',
        '"look at /mnt/home/alice, please"': '"look at home, please"',
        '"hf://datasets/org/name"': '"hf://datasets/org/name"',
        '"Answer: 12:30, 1.2.3, std::sort, [a-f], a\\tb\\u007f"': '"Answer: 12:30, 1.2.3, std::sort, [a-f], a\\tb\\u007f"',
        '"model.layers.0:mlp"': '"model.layers.0:mlp"',
        '"https://api.example.com/v1/chat"': '"https://api.example.com/v1/chat"',
        '"</think>"': '"</think>"',
        '"/no_think"': '"/no_think"',
        '"and/or 1/2/3"': '"and/or 1/2/3"',
        '"org/model"': '"org/model"',
        '"a \\"/srv/a/b.txt\\" c"': '"a \\"b.txt\\" c"',
    }
    for given, wanted in shown.items():
        assert public(f"key = {given}") == f"key = {wanted}"


def test_what_a_run_lacks_is_left_out(make):
    folder, run, config = make(lines=[], files={"model.bin": 1}, model={}, data={}, reward=[])
    (run.path / "env.json").unlink()
    card = card_of(folder, run, config, step=1)
    assert card.data.to_dict() == {
        "tags": ["engine", "rl", "grpo", "ppo_clip"],
        "model_name": "out",
    }
    assert "A language model, trained with Engine: 1 step of the trainer `rl`" in card.text
    assert re.findall(r"^## (.+)$", card.text, re.MULTILINE) == ["Training"]
    assert "versions" not in card.text
    assert "curves.png" not in card.text
    assert not (folder / "curves.png").exists()


def test_without_matplotlib_the_card_has_no_picture(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder, run, config = make()
    card = card_of(folder, run, config)
    assert "curves.png" not in card.text
    assert "matplotlib" not in card.text
    assert not (folder / "curves.png").exists()


def test_results_of_an_earlier_step_are_shown_as_such_and_are_no_metadata(make):
    later = {"step": 3, "reward/mean": 0.9}
    folder, run, config = make(lines=[*LINES, later, {"step": 4, "eval/accuracy": 0.9876}])
    card = card_of(folder, run, config, step=3)
    assert card.data.eval_results is None
    assert "measured after step 2; the published weights are those of step 3." in card.text
    assert "0.9876" not in card.text


def test_a_public_data_set_is_named_with_its_license(make):
    folder, run, config = make(environment={"data_sources": SOURCES}, data={"source": "gsm8k"})
    card = card_of(folder, run, config)
    assert card.data.datasets == ["openai/gsm8k"]
    assert "on [gsm8k](https://huggingface.co/datasets/openai/gsm8k) with Engine" in card.text
    assert "License of the training data: gsm8k: MIT (revision `abc`).\n" in card.text


def test_the_parts_of_a_mix_are_named_with_their_licenses(make):
    mix = [
        {"source": "gsm8k", "weight": 2},
        {"path": "/home/alice/own.jsonl", "weight": 1},
        {"source": "math", "weight": 1},
    ]
    folder, run, config = make(environment={"data_sources": SOURCES}, data={"mix": mix})
    card = card_of(folder, run, config)
    assert card.data.datasets == ["openai/gsm8k"]
    named = (
        "[gsm8k](https://huggingface.co/datasets/openai/gsm8k), `own.jsonl`, [math](https://example.org/math)"
    )
    assert f"on {named} with Engine" in card.text
    assert "License of the training data: gsm8k: MIT (revision `abc`); math: CC0-1.0.\n" in card.text


def test_a_score_is_credited_to_the_data_set_of_its_own_set(make):
    sets = [
        {"name": "math", "source": "math500", "rewards": ["boxed", "numeric"]},
        {"name": "hard", "path": "/data/a.jsonl"},
    ]
    line = {"step": 2, "eval/accuracy": 0.5, "eval/math/accuracy": 0.25, "eval/hard/accuracy": 0.125}
    line |= {"eval/math/truncated_share": 0.75, "eval/math/prompts": 20}
    data = {"source": "gsm8k"}
    folder, run, config = make([line], {"data_sources": SOURCES}, data=data, eval={"set": sets})
    card = card_of(folder, run, config)
    found = [
        (r.dataset_type, r.dataset_name, r.dataset_split, r.dataset_revision, r.metric_type, r.metric_value)
        for r in card.data.eval_results
    ]
    assert found == [
        ("openai/gsm8k", "gsm8k", None, "abc", "accuracy", 0.5),
        ("HuggingFaceH4/MATH-500", "math500", None, "def", "accuracy", 0.25),
        ("hard", "a.jsonl", None, None, "accuracy", 0.125),
    ]
    assert card.data.datasets == ["openai/gsm8k"]
    math = "[math500](https://huggingface.co/datasets/HuggingFaceH4/MATH-500), 20 prompts, 1 response each, greedy"
    assert f"- `math`: {math}, at most 64 tokens, scored by `boxed`\n" in card.text


def test_the_license_and_the_lineage_are_those_of_the_base_models_own_card(make, tmp_path, capsys):
    base = tmp_path / "my-sft"
    base.mkdir()
    folder, run, config = make(model={"path": str(base)})
    assert card_of(folder, run, config).data.license is None
    said = "engine: no license of my-sft is known: add 'license: NAME' to the metadata of README.md.\n"
    assert capsys.readouterr().err == said
    card = "---\nbase_model: org/origin\nlicense: other\nlicense_name: odd\n---\n"
    (base / "README.md").write_text(card)
    found = card_of(folder, run, config)
    assert (found.data.base_model, found.data.license, found.data.get("license_name")) == (
        "org/origin",
        "other",
        "odd",
    )
    assert capsys.readouterr().err == ""
    assert "trained from `my-sft` (from [org/origin](https://huggingface.co/org/origin))" in found.text
    (base / "README.md").write_text("---\nbase_model: [\n---\n")
    assert card_of(folder, run, config).data.base_model is None


def test_the_card_of_a_hub_model_is_fetched_for_its_license(make, hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder, run, config = make()
    hub.repos["org/base-1b"] = hub.new_repo()
    fetch_base_card(config, "actor")  # a repository without a card
    assert card_of(folder, run, config).data.license is None
    hub.repos["org/base-1b"].files()["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    fetch_base_card(config, "actor")
    assert card_of(folder, run, config).data.license == "apache-2.0"


def test_a_hub_that_fails_leaves_the_license_out(make, hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder, run, config = make()
    hub.fault = lambda method, path: 500
    fetch_base_card(config, "actor")
    assert card_of(folder, run, config).data.license is None


def test_a_trainer_with_a_loss_of_its_options_is_tagged_with_it(make, tmp_path):
    folder, run, _ = make()
    pairs = load_config(overrides={"trainer": "dpo", "dpo.loss": "ipo", "model.path": "org/base-1b"})
    card = card_of(folder, run, pairs)
    assert card.data.tags == ["engine", "dpo", "ipo"]
    assert "2 steps of the trainer `dpo` (`ipo`)." in card.text


def test_an_adapter_names_its_base_and_loads_with_peft(make):
    files = {"adapter_config.json": {"task_type": "CAUSAL_LM"}}
    folder, run, config = make(files=files, actor={"lora": {"rank": 8}})
    card = card_of(folder, run, config, adapter=True, name="me/math")
    assert (card.data.library_name, card.data.get("base_model_relation")) == ("peft", "adapter")
    assert card.data.tags[-1] == "lora"
    assert 'from_pretrained("org/base-1b", dtype="auto")' in card.text
    assert 'PeftModel.from_pretrained(base, "me/math")' in card.text
    assert "vllm" not in card.text
    assert "| LoRA | rank 8, alpha 32 |" in card.text


def test_a_critic_has_no_results_and_is_no_language_model(make):
    folder, run, config = make(files={"config.json": {"architectures": ["Qwen3ForSequenceClassification"]}})
    card = card_of(folder, run, config, role="critic")
    assert card.data.pipeline_tag == "text-classification"
    assert card.text.lstrip().splitlines()[2].startswith("The critic of a run trained from")
    assert "AutoModelForSequenceClassification" in card.text
    assert "Results" not in card.text


def test_a_new_name_leaves_the_published_run_file_as_it_is(make):
    folder, run, config = make()  # named "math"
    card_of(folder, run, config, name="math")
    rename_card(folder, "me/math")
    text = (folder / "README.md").read_text()
    assert 'from_pretrained("me/math")' in text
    assert 'name = "math"' in text.partition("````toml")[2]


def rollout(**columns):
    prompt = Prompt("train:0", [1], "p", columns)
    zeros = torch.zeros(2)
    return Rollout("0", prompt, torch.tensor([1, 2]), zeros.bool(), zeros, zeros.int(), "stop")


MESSAGES = [{"role": "user", "content": "2+2="}]


@pytest.mark.parametrize(
    ("key", "stored", "row", "expected"),
    [
        (True, {}, {"prompt": "2+2="}, True),
        (False, {"messages": MESSAGES}, {"prompt": MESSAGES}, False),
        (None, {}, {"prompt": MESSAGES}, False),
        (None, {"messages": MESSAGES}, {"prompt": "2+2="}, True),
        (None, None, {"prompt": "2+2=", "response": "4"}, False),
        (None, None, {"prompt": MESSAGES, "response": "4"}, True),
        (None, None, {"messages": [*MESSAGES, {"role": "assistant", "content": "4"}]}, True),
        (None, None, {"chosen": MESSAGES, "rejected": []}, True),
        (None, None, None, True),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_example_uses_the_chat_template_where_the_run_did(
    make, tmp_path, key, stored, row, expected, suffix
):
    data = {"train": str(tmp_path / f"rows.{suffix}"), "chat_template": key}
    if row is not None and suffix == "jsonl":
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    elif row is not None:
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    folder, run, config = make(data=data)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    if stored is not None:
        write_rollouts(run.rollouts_dir, 1, [rollout(**stored)])
    text = card_of(folder, run, config).text
    assert ("apply_chat_template" in text, "model.chat(" in text) == (expected, expected)


@pytest.mark.parametrize("chat", [False, True])
def test_the_example_of_a_card_runs(engine, sft_run, tmp_path, chat):
    sets = ["chat_template=true", "system='Say <a>'", "chat_template_kwargs.enable_thinking=false"]
    assert engine("train", "run.toml", "--steps", "1").code == 0
    assert engine("export", "first", "out", "--card").code == 0
    if chat:
        template = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if enable_thinking is false %}!{% endif %}"
        (tmp_path / "out" / "chat_template.jinja").write_text(template)
        run = RunFolder.open("first")
        write_card(Path("out"), run, read_run(run, [f"data.{each}" for each in sets]), 1)
    text = (tmp_path / "out" / "README.md").read_text()
    block, vllm = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ("apply_chat_template" in block) == chat
    assert ("chat(messages, sampling, chat_template_kwargs={'enable_thinking': False})" in vllm) == chat
    compile(vllm, "vllm.py", "exec")
    (tmp_path / "example.py").write_text(block.replace("max_new_tokens=256", "max_new_tokens=3"))
    found = runpy.run_path(str(tmp_path / "example.py"))
    assert found["answer"].shape[1] > found["tokens"]["input_ids"].shape[1]
    if chat:
        system = {"role": "system", "content": "Say <a>"}
        assert found["messages"][0] == system
        shown = found["tokenizer"].decode(found["tokens"]["input_ids"][0])
        assert shown == found["tokenizer"].decode(
            found["tokenizer"](f"[Say <a>][{found['messages'][1]['content']}]!")["input_ids"]
        )
