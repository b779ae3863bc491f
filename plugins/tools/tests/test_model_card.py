"""The model card of an export: valid metadata, what it shows, what it leaves out, what it must not show."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id

from engine_core import load_config
from engine_core.cli.loading import read_run
from engine_core.config import EngineConfig
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.model_card import public, write_card

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
    source = {
        "name": "gsm8k",
        "license": "MIT",
        "revision": "abc",
        "url": "https://huggingface.co/datasets/openai/gsm8k",
    }
    data = {"source": "", "train": ""}
    folder, run, config = make(environment={"data_source": source}, data=data)
    card = card_of(folder, run, config)
    assert card.data.datasets == ["openai/gsm8k"]
    assert "on [gsm8k](https://huggingface.co/datasets/openai/gsm8k) with Engine" in card.text
    assert "License of the training data: MIT (revision `abc`)." in card.text


def test_the_license_and_the_lineage_are_those_of_the_base_models_own_card(make, tmp_path):
    base = tmp_path / "my-sft"
    base.mkdir()
    folder, run, config = make(model={"path": str(base)})
    assert card_of(folder, run, config).data.license is None
    card = "---\nbase_model: org/origin\nlicense: other\nlicense_name: odd\n---\n"
    (base / "README.md").write_text(card)
    found = card_of(folder, run, config)
    assert (found.data.base_model, found.data.license, found.data.get("license_name")) == (
        "org/origin",
        "other",
        "odd",
    )
    assert "trained from `my-sft` (from [org/origin](https://huggingface.co/org/origin))" in found.text
    (base / "README.md").write_text("---\nbase_model: [\n---\n")
    assert card_of(folder, run, config).data.base_model is None


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


@pytest.mark.parametrize("chat", [False, True])
def test_the_example_of_a_card_runs(engine, sft_run, tmp_path, chat):
    assert engine("train", "run.toml", "--steps", "1").code == 0
    assert engine("export", "first", "out", "--card").code == 0
    if chat:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (tmp_path / "out" / "chat_template.jinja").write_text(template)
        run = RunFolder.open("first")
        write_card(Path("out"), run, read_run(run, None), 1)
    text = (tmp_path / "out" / "README.md").read_text()
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert ("apply_chat_template" in block) == chat
    (tmp_path / "example.py").write_text(block.replace("max_new_tokens=256", "max_new_tokens=3"))
    found = runpy.run_path(str(tmp_path / "example.py"))
    assert found["answer"].shape[1] > found["tokens"]["input_ids"].shape[1]
