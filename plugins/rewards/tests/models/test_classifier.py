"""Scores of a real engine against transformers' own forward of one sequence after the other."""

import functools

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine_core.errors import DataError

WORDS = ["", "4", "four", "The answer is 4.", "7" * 40, "é 你 \U0001f600"]
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def scorer(asking):
    return functools.partial(asking, "model")


def one_by_one(path, sequences):
    """Return transformers' own score of each sequence alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in sequences]


def columns_of(words, tokenizer=None, **more):
    found = {"prompts": ["Q: "] * len(words), "completions": words, **more}
    if tokenizer is not None:
        found["token_ids"] = [tokenizer("Q: " + word)["input_ids"] for word in words]
    return found


def values(outcomes):
    assert not [o.message for o in outcomes if o.failure]
    return [o.value for o in outcomes]


@pytest.mark.parametrize("budget", [16, 8192], ids=["many micro-batches", "one pack"])
def test_scores_are_those_of_transformers_one_by_one(scorer, folder_of, tokenizer, budget):
    path = folder_of()
    found = values(
        scorer(path, tokenizer, max_tokens_per_rank=budget).score(columns_of(WORDS, tokenizer), len(WORDS))
    )
    expected = one_by_one(path, [[*tokenizer("Q: " + word)["input_ids"], 1] for word in WORDS])
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in found}) == len(WORDS)  # texts are told apart


def test_a_tokenizer_that_is_not_the_actors_reads_the_text_through_its_own_template(
    scorer, folder_of, tokenizer, tokenizer_of
):
    own = tokenizer_of(first="<unk>")
    assert own("a")["input_ids"] != tokenizer("a")["input_ids"]
    path = folder_of(tokenizer=own)
    rows = columns_of(WORDS, tokenizer, messages=[CHAT] * len(WORDS))
    found = values(scorer(path, tokenizer, ["messages"]).score(rows, len(WORDS)))
    texts = [f"<|user|>2+2?<eos>\n<|assistant|>{word}<eos>\n" for word in WORDS]
    assert found == pytest.approx(one_by_one(path, [own(text)["input_ids"] for text in texts]), abs=1e-5)


def test_the_actors_own_tokens_are_scored_as_they_are(scorer, folder_of, tokenizer):
    """Tokens that no text gives: tokenizing the text again would lose them."""
    path, odd = folder_of(), [2, 3, 4, 5, 0, 0, 9]
    rows = {"prompts": ["Q"], "completions": ["x"], "token_ids": [odd]}
    assert values(scorer(path, tokenizer).score(rows, 1)) == pytest.approx(
        one_by_one(path, [[*odd, 1]]), abs=1e-5
    )
    anew = values(scorer(path, tokenizer, reuse_token_ids=False).score(rows, 1))
    assert anew == pytest.approx(one_by_one(path, [tokenizer("Qx<eos>")["input_ids"]]), abs=1e-5)


def test_a_score_at_the_last_sampled_token(scorer, folder_of, tokenizer):
    path, ids = folder_of(), tokenizer("Q: 4")["input_ids"]
    found = scorer(path, tokenizer, score_at="sampled").score({"token_ids": [ids], **columns_of(["4"])}, 1)
    assert values(found) == pytest.approx(one_by_one(path, [ids]), abs=1e-5)


def test_half_precision_is_near(scorer, folder_of, tokenizer):
    path = folder_of()
    rows = columns_of(WORDS, tokenizer)
    whole = values(scorer(path, tokenizer).score(rows, len(WORDS)))
    half = values(scorer(path, tokenizer, torch={"param_dtype": "bf16"}).score(rows, len(WORDS)))
    assert half == pytest.approx(whole, abs=0.1, rel=0.05)
    assert half != whole


def test_a_sample_that_cannot_be_scored_fails_alone(scorer, folder_of, tokenizer):
    path = folder_of()
    words = ["4", "9" * 200, "5"]
    outcomes = scorer(path, tokenizer).score(columns_of(words, tokenizer), 3)
    assert outcomes[1].message == "it has 204 tokens, and the reward's model takes 1 to 128 (max_tokens)"
    expected = one_by_one(path, [[*tokenizer("Q: " + word)["input_ids"], 1] for word in ("4", "5")])
    assert [outcomes[0].value, outcomes[2].value] == pytest.approx(expected, abs=1e-5)
    short = scorer(path, tokenizer, max_tokens=5).score(columns_of(["4", "55"], tokenizer), 2)
    assert [o.failure for o in short] == ["", "error"]


def test_a_refused_conversation_fails_alone(scorer, folder_of, tokenizer, tokenizer_of):
    own = tokenizer_of(
        "{% if 'aaaaa' in messages[0].content %}{{ raise_exception('too many characters') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    silent = [{"role": "user", "content": ""}]
    rows = columns_of(["a", "b", ""], messages=[CHAT, [{"role": "user", "content": "aaaaa"}], silent])
    outcomes = scorer(folder_of(tokenizer=own), tokenizer, ["messages"], score_at="sampled").score(rows, 3)
    assert [o.failure for o in outcomes] == ["", "error", "error"]
    assert "too many characters" in outcomes[1].message
    assert outcomes[2].message == "it has 0 tokens, and the reward's model takes 1 to 128 (max_tokens)"


def test_a_score_that_is_not_finite_is_a_failure(scorer, folder_of, tokenizer):
    from safetensors.torch import load_file, save_file

    path = folder_of()
    weights = load_file(f"{path}/model.safetensors")
    weights["score.weight"][:] = float("nan")
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    (outcome,) = scorer(path, tokenizer).score(columns_of(["4"], tokenizer), 1)
    assert (outcome.failure, outcome.message) == ("error", "the reward model gave nan")


def test_no_samples_are_no_work(scorer, folder_of):
    assert scorer(folder_of()).score({"prompts": [], "completions": []}, 0) == []


def test_folders_that_hold_no_trained_score_are_refused(scorer, folder_of, tokenizer_of, tmp_path):
    with pytest.raises(
        DataError, match=r"reward\.r\.model\.path: .* holds a Qwen3ForCausalLM, which gives no score"
    ):
        scorer(folder_of("lm", kind=folder_of.language_model))
    with pytest.raises(DataError, match=r"has 3 labels\. Expected a sequence classifier with one label"):
        scorer(folder_of("three", labels=3))
    headless = folder_of("headless")
    (tmp_path / "headless" / "model.safetensors").unlink()
    with pytest.raises(DataError, match="has no weights called 'score'"):
        scorer(headless)
    with pytest.raises(
        DataError, match=r"reward\.r\.model: The tokenizer has ids up to 260.*model embeds ids 0 to 99"
    ):
        scorer(folder_of("small", vocab_size=100))
    with pytest.raises(DataError, match="rows are conversations, and its tokenizer has no chat template"):
        scorer(folder_of("plain", tokenizer=tokenizer_of(None)), tokenizer_of(), ["messages"])
