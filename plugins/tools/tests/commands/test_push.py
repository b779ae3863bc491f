"""engine push, against a stand-in of the hub on loopback, through huggingface_hub's own client."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine_core.cli.loading import load_trainer, read_run
from engine_core.runs.checkpoint import Checkpoints
from engine_core.runs.tracking import RunFolder

SECRET = "planted-secret-7391"
PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Options


class JudgeOptions(Options):
    api_key: str = ""


@hookimpl
def engine_options():
    return JudgeOptions
"""


@pytest.fixture
def trained(engine, sft_run):
    """Return the folder of a finished run whose run file holds a secret."""
    (sft_run.parent / "judge.py").write_text(PLUGIN)
    text = sft_run.read_text().replace('trainer = "sft"', 'trainer = "sft"\nplugins = ["judge.py"]')
    sft_run.write_text(f'{text}\n[plugin.judge]\napi_key = "{SECRET}"\n')
    assert engine("train", "run.toml", "--set", "actor.optim.lr=0.01").code == 0
    return sft_run.parent / "runs" / "first"


@pytest.fixture
def exported(tmp_path):
    """Return a folder like an exported one, with weights of a few network packets."""
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.randn(300, 300)}, folder / "model.safetensors")
    return folder


TOKENS = torch.tensor([[5, 9, 17, 30, 4, 11]])


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS).logits


def logits_of_run(path):
    run = RunFolder.open(path)
    with closing(load_trainer(read_run(run, None))) as trainer:
        trainer.load_checkpoint(Checkpoints(run.checkpoints).chosen())
        return logits_of(trainer.runtime.engines["actor"].module)


def download(hub, folder, revision="main"):
    """Download the repository with huggingface_hub's own client."""
    return Path(
        snapshot_download("me/model", revision=revision, endpoint=hub.url, cache_dir=folder, max_workers=1)
    )


def everything_sent(hub):
    """Return all that the hub received and keeps, except the token of its own header."""
    for _, path, headers, body in hub.requests:
        yield path.encode()
        yield body
        yield json.dumps({k: v for k, v in headers.items() if k.lower() != "authorization"}).encode()
    for repo in hub.repos.values():
        for commits in repo.branches.values():
            yield from commits[-1].values()


def test_what_arrives_has_the_logits_of_the_run_and_no_secret(hub, trained, tmp_path):
    """As a user's process: the endpoint, the token and the secret are in the environment."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "JUDGE_API_KEY": f"of-the-environment-{SECRET}",
        "LOG_LEVEL": "DEBUG",
    }
    command = [sys.executable, "-m", "engine_core.cli.main", "push", "first", "me/model", "--private"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    repo = hub.repos["me/model"]
    assert ended.stdout == f"{hub.url}/me/model/commit/{repo.sha()}\n"
    assert repo.private
    found = download(hub, tmp_path / "cache")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(found)), logits_of_run(trained))
    assert AutoTokenizer.from_pretrained(found).decode([14, 15]) == "lm"
    assert ModelCard.load(found / "README.md").data.library_name == "transformers"
    assert (found / "curves.png").read_bytes()[1:4] == b"PNG"
    for secret in (SECRET, os.environ["HF_TOKEN"], str(tmp_path), str(Path.home())):
        assert not any(secret.encode() in data for data in everything_sent(hub)), secret
    assert platform.node() not in (found / "README.md").read_text().split()
    for secret in (SECRET, os.environ["HF_TOKEN"]):
        assert secret not in ended.stdout + ended.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_license_of_a_base_model_of_the_hub_arrives_with_the_card(
    hub, engine, sft_run, tiny_model, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.repos["org/base"] = hub.new_repo()
    hub.repos["org/base"].files()["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model)).save_pretrained(
        tmp_path / "base"
    )
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    base = {file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}
    hub.repos["org/base"].files().update(base)
    sft_run.write_text(sft_run.read_text().replace(str(tiny_model), "org/base"))
    answer = engine("train", "run.toml")
    assert answer.code == 0, answer.err
    answer = engine("push", "first", "me/model", "--dry-run")
    assert (
        "engine: no license of org/base is known: add 'license: NAME' to the metadata of README.md."
        in answer.err
    )
    answer = engine("push", "first", "me/model")
    assert (answer.code, "no license" in answer.err) == (0, False), answer.err
    assert ModelCard(hub.repos["me/model"].files()["README.md"].decode()).data.license == "apache-2.0"


def test_an_adapter_arrives_with_the_name_of_its_base(hub, engine, sft_run, tiny_model, tmp_path):
    base = tmp_path / "my-base"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model)).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    text = sft_run.read_text().replace(str(tiny_model), str(base))
    sft_run.write_text(f"{text}\n[actor.lora]\nrank = 2\n")
    assert engine("train", "run.toml", "--set", "actor.optim.lr=0.05").code == 0
    answer = engine("push", "first", "me/model", "--adapter")
    assert answer.code == 0, answer.err
    assert "the adapter's base model is the folder 'my-base' on this machine" in answer.err
    found = download(hub, tmp_path / "cache")
    assert not list(found.glob("model*.safetensors"))
    settings = json.loads((found / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "my-base"
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), found)
    torch.testing.assert_close(logits_of(adapted), logits_of_run(tmp_path / "runs" / "first"))
    card = ModelCard.load(found / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert card.data.tags == ["engine", "sft", "lora"]


def test_a_second_push_replaces_the_weights_and_leaves_other_files(hub, engine, trained):
    assert engine("push", "first", "me/model", "--step", "1").code == 0
    repo = hub.repos["me/model"]
    kept = {"LICENSE": b"mine", "notes/model.safetensors.txt": b"mine"}
    stale = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}"}
    repo.branches["main"].append({**repo.files(), **kept, **stale, "adapter_config.json": b"{}"})
    answer = engine("push", "first", "me/model")
    assert answer.code == 0, answer.err
    assert "'me/model' exists: this adds a commit and replaces the weights" in answer.err
    first, _, last = repo.branches["main"][1:]
    assert set(last) == {*first, *kept}
    assert last["model.safetensors"] != first["model.safetensors"]


def test_a_branch_is_made_and_main_stays(hub, engine, trained):
    assert engine("push", "first", "me/model", "--branch", "step-1", "--step", "1").code == 0
    repo = hub.repos["me/model"]
    assert repo.files("main") == {}
    assert "model.safetensors" in repo.files("step-1")


def test_an_exported_folder_is_pushed_under_its_new_name_and_stays_as_it_is(hub, engine, trained, tmp_path):
    assert engine("export", "first", "out", "--card").code == 0
    out = tmp_path / "out"
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert engine("push", "out", "me/model").code == 0
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    sent = hub.repos["me/model"].files()
    assert set(sent) == set(before)
    assert {name for name in sent if sent[name] != before[name]} == {"README.md"}
    card = ModelCard(sent["README.md"].decode())
    assert 'from_pretrained("out")' in before["README.md"].decode()
    assert 'from_pretrained("me/model")' in card.text
    assert '"out"' not in card.text
    assert card.data.model_name == "me/model"
    assert card.text.lstrip().startswith("# me/model\n")


def test_a_dry_run_lists_everything_and_contacts_nothing(hub, engine, trained, tmp_path):
    answer = engine("push", "first", "me/model", "--dry-run", "--branch", "x", "--private")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("me/model, branch x, private, nothing is uploaded:\nREADME.md  ")
    assert re.search(r"^model.safetensors +[\d,]+ bytes$", answer.out, re.MULTILINE)
    assert "library_name: transformers" in answer.out
    assert hub.requests == []
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("first model", "'model' is no name of a repository. Write USER/NAME"),
        ("first me/a--b", "'me/a--b' is no name of a repository: Cannot have -- or .."),
        ("first me/model --role critc", "--role: step_00000002 holds no model 'critc'. Known: actor."),
        ("first me/model --adapter", "--adapter: the run has no [actor.lora]: it trained the whole model."),
        ("exported me/model --adapter --step 1", "--step, --adapter: 'exported' is an exported model"),
        ("first other/model", "The hub answered 403 (You don't have the rights to create a model there): the token"),
        ("first me/public --private", "--private: 'me/public' exists and is public."),
    ],
)  # fmt: skip
def test_what_cannot_be_pushed_is_refused_before_the_export(
    hub, engine, trained, exported, tmp_path, words, message
):
    hub.repos["me/public"] = hub.new_repo()
    answer = engine("push", *words.split())
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert hub.asked("POST", "preupload") == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_without_a_token_the_message_says_how_to_log_in(hub, engine, exported, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "nowhere")
    answer = engine("push", "exported", "me/model")
    assert answer.code == 2
    assert "No token for the Hugging Face hub. Log in with 'hf auth login', or set HF_TOKEN" in answer.err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("path", "status", "code", "message"),
    [
        ("whoami-v2", 401, 2, "it does not accept the token. Log in with 'hf auth login'"),
        ("whoami-v2", 503, 5, "The hub answered 503 (A fault of the test). Nothing was uploaded."),
        ("preupload", 403, 2, "the token has no right to write to 'me/model'. Check the name, or log in"),
        ("preupload", 404, 2, "'me/model' does not exist, or the token cannot see it. The hub confirmed no commit"),
        ("large/", 500, 5, "The hub answered 500 (A fault of the test). The hub confirmed no commit"),
        ("large/", "drop", 5, "nothing was published. Run the command again; what the hub holds is not sent"),
        ("commit/main", "drop", 5, "The hub confirmed no commit: nothing was published."),
    ],
)  # fmt: skip
def test_a_fault_that_stays_ends_the_push_and_publishes_nothing(
    hub, engine, exported, tmp_path, path, status, code, message
):
    hub.fault = lambda method, asked: status if path in asked else None
    answer = engine("push", "exported", "me/model")
    assert (answer.code, message in answer.err) == (code, True), answer.err
    assert "Traceback" not in answer.err
    assert len(hub.repos["me/model"].branches["main"]) == 1 if "me/model" in hub.repos else True
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("fault", [500, "drop"])
def test_a_fault_that_passes_is_retried(hub, engine, exported, fault):
    left = {"preupload": 1, "large/": 2}

    def failing(method, path):
        part = next((part for part in left if part in path and left[part]), None)
        if part is None:
            return None
        left[part] -= 1
        return fault

    hub.fault = failing
    answer = engine("push", "exported", "me/model")
    assert answer.code == 0, answer.err
    assert sum(left.values()) == 0
    assert "model.safetensors" in hub.repos["me/model"].files()


def test_metadata_that_the_hub_refuses_are_named(hub, engine, exported):
    (exported / "README.md").write_text("---\nbase_model: a b\n---\n")
    answer = engine("push", "exported", "me/model")
    assert answer.code == 2
    assert "Invalid metadata in README.md. - Repo id must use alphanumeric chars" in answer.err
    assert "nothing was published." in answer.err


def test_weights_that_another_machine_keeps_are_missed_before_the_upload(hub, engine, trained, monkeypatch):
    monkeypatch.setattr("engine_plugin_torch.engine.TorchEngine.export", lambda self, folder: None)
    answer = engine("push", "first", "me/model")
    assert answer.code == 5
    assert (
        "the role 'actor' runs on another machine. Set TMPDIR to a folder that all machines share"
        in answer.err
    )
    assert hub.asked("POST", "preupload") == 0
