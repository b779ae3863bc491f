from __future__ import annotations

import os

import httpx
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import Qwen3Config

from engine_core.config.roles import ModelConfig
from engine_core.data.tokenizer import (
    check_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    tokens_differ,
    use_cache_if_unreachable,
)
from engine_core.errors import DataError


def test_a_tokenizer_loads_from_its_folder_or_the_models(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.encode("12 plus 7")
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).encode("12 plus 7") == ids
    assert load_tokenizer(ModelConfig(path="absent", tokenizer=str(tmp_path))).encode("12 plus 7") == ids


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), r"model\.path: missing\. Give"),
        (ModelConfig(path="./absent"), r"model\.path: there is no folder './absent'\."),
        (
            ModelConfig(path="x", tokenizer="/absent/tok"),
            r"model\.tokenizer: there is no folder '/absent/tok'\.",
        ),
    ],
)
def test_an_absent_folder_is_named_without_asking_the_network(model, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(model)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=f"no tokenizer loads from '{tmp_path}': "):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_tokenizer_that_fits_has_no_remarks(tokenizer):
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    assert check_tokenizer(tokenizer, Qwen3Config(vocab_size=len(tokenizer), **ids)) == []


def test_a_vocabulary_larger_than_the_embedding_is_refused_with_the_ids(tokenizer):
    size = len(tokenizer) - 2
    token = tokenizer.convert_ids_to_tokens(size)
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, Qwen3Config(vocab_size=size, eos_token_id=2, pad_token_id=None))
    assert (
        f"ids up to {size + 1}, but the model embeds ids 0 to {size - 1} (vocab_size {size}): "
        f"2 tokens have no embedding, such as {token!r} = {size}"
    ) in str(caught.value)
    assert "[model] tokenizer" in str(caught.value)


def test_special_ids_outside_the_model_are_refused_by_name(tokenizer):
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=[2, 9999], pad_token_id=-1)
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, config)
    assert (
        f"The model's config has eos_token_id 9999, outside the model's ids 0 to {len(tokenizer) - 1}."
        in str(caught.value)
    )
    assert "The model's config has pad_token_id -1" in str(caught.value)


def test_a_tokenizer_without_an_end_is_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token, so a response could never end"):
        check_tokenizer(tokenizer, Qwen3Config(vocab_size=len(tokenizer)))


def test_differing_ends_are_remarked(make_tokenizer):
    tokenizer = make_tokenizer()
    (remark,) = check_tokenizer(tokenizer, Qwen3Config(vocab_size=len(tokenizer), eos_token_id=[0, 1]))
    assert remark.startswith(
        "The model's config ends sequences with [0, 1], the tokenizer with 2 ('<|im_end|>')"
    )


def test_a_chat_template_that_never_ends_a_turn_is_remarked(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=0)
    (remark,) = check_tokenizer(tokenizer, config)
    assert remark.startswith("The chat template never writes the end of sequence ('<|im_end|>' = 2)")


def test_the_hash_is_that_of_the_saved_copy(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(load_tokenizer(ModelConfig(path=str(tmp_path)))) == tokenizer_hash(tokenizer)


def test_the_hash_ignores_the_settings_of_the_last_call(make_tokenizer):
    tokenizer = make_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["one two", "three"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before


def test_the_hash_changes_with_vocabulary_template_and_special_tokens(make_tokenizer):
    other_end = make_tokenizer()
    other_end.eos_token = "<|im_start|>"
    hashes = {
        tokenizer_hash(tokenizer)
        for tokenizer in (make_tokenizer(), make_tokenizer(size=300), make_tokenizer("{{ 1 }}"), other_end)
    }
    assert len(hashes) == 4


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"no tokenizer loads from 'nobody/nothing': .*give a local folder in"
    ):
        load_tokenizer(ModelConfig(path="nobody/nothing"))


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, caplog):
    asked = []

    def refuse(self, name, timeout):
        asked.append(name)
        raise httpx.ConnectError("no such host")

    monkeypatch.setattr(HfApi, "model_info", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for _ in range(2):
        with pytest.raises(DataError, match="no tokenizer loads from 'nobody/nothing': "):
            load_tokenizer(ModelConfig(path="nobody/nothing"))
    assert asked == ["nobody/nothing"]
    assert caplog.text.count("The hub does not answer (no such host): only cached files are used.") == 1
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"


def test_a_hub_that_answers_stays_in_use(monkeypatch):
    answer = HfHubHTTPError(
        "no such model", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    )

    def refuse(self, name, timeout):
        raise answer

    monkeypatch.setattr(HfApi, "model_info", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_cache_if_unreachable("nobody/nothing")
    assert not constants.HF_HUB_OFFLINE


def test_tokenizers_differ_where_an_id_means_another_token_and_not_by_template(make_tokenizer):
    mine = make_tokenizer()
    assert tokens_differ(mine, make_tokenizer(template="{{ 1 }}")) == ""
    larger = make_tokenizer()
    larger.add_tokens(["<new>"])
    size = len(mine)
    assert (
        tokens_differ(mine, larger)
        == f"1 of {size + 1} ids differ: id {size} is no token here and '<new>' there"
    )
    other_end = make_tokenizer()
    other_end.eos_token = "<|im_start|>"
    assert tokens_differ(mine, other_end) == "a sequence ends with id 2 here and with 1 there"
