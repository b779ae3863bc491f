"""Rows that are longer than a model has positions, in every trainer that learns from rows."""

import shutil

import pytest
from transformers import GPT2Config

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.data import load_tokenizer
from engine_core.errors import DataError

POSITIONS = 24
LONG = "9 + " * POSITIONS
FITS = {
    "sft": {"prompt": "1 + 2 = ", "response": "3"},
    "dpo": {"prompt": "1 + 2 = ", "chosen": "3", "rejected": "4"},
    "kto": {"prompt": "1 + 2 = ", "completion": "3", "label": True},
    "reward_model": {"prompt": "1 + 2 = ", "chosen": "3", "rejected": "4"},
}


@pytest.fixture
def made(world, tmp_path):
    """A trainer by name, of rows and with these settings, over a model with a table of positions."""
    model = tmp_path / "gpt2"
    shutil.copytree(world / "model", model)
    (model / "model.safetensors").unlink(missing_ok=True)
    tokens = len(load_tokenizer(load_config(overrides={"trainer": "sft", "model.path": str(model)}).model))
    GPT2Config(
        vocab_size=tokens,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
    ).save_pretrained(model)
    trainers = []

    def make(name, rows, **changes):
        settings = {
            "trainer": name,
            "model.path": str(model),
            "data.columns.response": "response",
            "data.prompts_per_step": 2,
            "run.dir": str(tmp_path / "runs"),
            "run.steps": 1,
            "tracking.trackers": [],
            **changes,
        }
        if name != "sft":
            del settings["data.columns.response"]
        config = load_config(overrides=settings)
        trainer = plugins_for(config).resolve("trainers", name)(config, data=rows)
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize("name", FITS)
def test_a_row_longer_than_the_models_positions_goes_the_way_of_over_long_rows(made, name):
    long = {**FITS[name], "prompt": LONG}
    trainer = made(name, [FITS[name], long, FITS[name]], **{"data.shuffle": False})
    metrics = trainer.train()
    assert metrics["data/over_long"] == 1
    stopped = made(name, [long, FITS[name]], **{"data.over_long": "error", "data.shuffle": False})
    with pytest.raises(DataError) as caught:
        stopped.train()
    assert "the model's number of positions (max_position_embeddings) is 24. Shorten the row" in str(
        caught.value
    )


def test_a_shorter_limit_of_the_table_is_told_by_its_key(made):
    trainer = made("sft", [FITS["sft"]], **{"sft.max_tokens": 3, "data.over_long": "error"})
    with pytest.raises(DataError, match=r"\[sft\] max_tokens is 3\. Raise it, or set over_long"):
        trainer.train()


def test_kto_puts_a_response_after_a_prompt_within_the_models_positions(made):
    rows = [
        {"prompt": "1 + " * 6, "completion": "1", "label": True},
        {"prompt": "1", "completion": "1 + " * 6, "label": False},
    ]
    assert made("kto", rows).train()["rewards/kl"] >= 0
