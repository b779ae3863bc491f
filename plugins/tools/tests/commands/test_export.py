"""export, on a tiny model."""

from __future__ import annotations

from engine_core import load_config
from engine_plugin_tools.commands.export import for_role


def test_export_is_a_folder_that_transformers_loads(engine, sft_run):
    assert engine("train", "run.toml").code == 0
    answer = engine("export", "first", "exported", "--step", "1")
    assert answer.code == 0
    assert answer.out == "exported\n"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = sft_run.parent / "exported"
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(out).decode([14, 15]) == "lm"
    best = engine("export", "first", "other", "--step", "best")
    assert "no checkpoint of first has a value of checkpoint.best_metric" in best.err
    assert (
        "expected the number of a step or 'best'" in engine("export", "first", "other", "--step", "last").err
    )
    again = engine("export", "first", "exported")
    assert again.code == 2
    assert "'exported' exists already" in again.err


def test_export_needs_neither_the_data_nor_the_rewards_of_the_run(engine, rl_run, tmp_path):
    assert engine("train", "rl.toml").code == 0
    (tmp_path / "rows.jsonl").unlink()
    answer = engine("export", "first", "exported")
    assert (answer.code, answer.err) == (0, "")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_an_export_starts_the_pool_of_its_role_alone(sft_run):
    pools = {
        "placement.pools": {"train": 2, "sample": 1},
        "placement.rollout": "sample",
        "placement.actor": "train",
    }
    options = {
        "runtime.backend": "torchrun",
        "runtime.torchrun.processes": 3,
        "runtime.torchrun.max_replacements": 1,
    }
    config = for_role(load_config(sft_run, pools | options), "actor")
    assert config.placement.pools == {"train": 2}
    assert (config.runtime.options.processes, config.runtime.options.max_replacements) == ("auto", 0)
    alone = load_config(sft_run)
    assert for_role(alone, "actor") is alone
