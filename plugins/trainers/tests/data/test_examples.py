"""What is learned of a row: the response or the assistant's turns, with their ends."""

from __future__ import annotations

import copy

import pytest
import torch

from engine_core.config.models import DataConfig
from engine_core.data.layouts import Row
from engine_core.data.rows import BadRow
from engine_core.errors import DataError
from engine_plugin_trainers.data.examples import Example, LearnedRenderer
from engine_plugin_trainers.sft import example_batch

USER = {"role": "user", "content": "What is 12 plus 7?"}
ASSISTANT = {"role": "assistant", "content": "The answer is 19."}
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def learned(tokenizer, rendered) -> str:
    """The text of the learned tokens, runs joined by '|'."""
    runs, previous = [], False
    for token, mask in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return "|".join(tokenizer.decode(run) for run in runs)


def with_template(tokenizer, template):
    """Return the tokenizer, or a copy with another chat template."""
    if template is None:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_text_response_is_learned_with_its_end(tokenizer):
    rendered = LearnedRenderer(tokenizer, DataConfig()).fit(Row("2+2=", "4"), 100)
    prompt, response = tokenizer.encode("2+2="), tokenizer.encode("4")
    assert rendered.token_ids == [*prompt, *response, tokenizer.eos_token_id]
    assert rendered.loss_mask == [False] * len(prompt) + [True] * (len(response) + 1)


def test_an_empty_response_is_a_bad_row(tokenizer):
    with pytest.raises(BadRow, match="the response is empty"):
        LearnedRenderer(tokenizer, DataConfig()).fit(Row("2+2=", ""), 100)


@pytest.mark.parametrize("template", [None, GENERATION])
def test_only_the_assistants_turns_are_learned_with_their_end(tokenizer, template):
    tokenizer = with_template(tokenizer, template)
    turns = [USER, ASSISTANT, {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    rendered = LearnedRenderer(tokenizer, DataConfig()).fit(Row(turns), 100)
    assert learned(tokenizer, rendered) == "The answer is 19.<|im_end|>|two<|im_end|>"
    assert tokenizer.decode(rendered.token_ids) == rendered.text


@pytest.mark.parametrize("template", [None, GENERATION])
def test_a_completion_is_learned_and_the_assistant_of_the_prompt_is_not(tokenizer, template):
    tokenizer = with_template(tokenizer, template)
    prompt = [USER, ASSISTANT, {"role": "user", "content": "one"}]
    row = Row(prompt, [{"role": "assistant", "content": "two"}])
    rendered = LearnedRenderer(tokenizer, DataConfig()).fit(row, 100)
    assert learned(tokenizer, rendered) == "two<|im_end|>"


def learning_all(tokenizer):
    """A renderer that also learns prompts."""
    renderer = LearnedRenderer(tokenizer, DataConfig())
    renderer.train_on_prompt = True
    return renderer


@pytest.mark.parametrize("row", [Row([USER, ASSISTANT]), Row("2+2=", "4"), Row("", "4")])
def test_the_prompt_is_learned_on_request_but_never_its_first_token(tokenizer, row):
    rendered = learning_all(tokenizer).fit(row, 100)
    assert rendered.loss_mask == [False] + [True] * (len(rendered.token_ids) - 1)


def test_the_first_token_of_a_response_without_a_prompt_is_not_learned(tokenizer):
    rendered = LearnedRenderer(tokenizer, DataConfig()).fit(Row("", "19"), 100)
    assert learned(tokenizer, rendered) == "9<|im_end|>"


def test_the_first_token_of_each_sequence_of_a_batch_is_not_learned(tokenizer):
    rows = [Row([USER, ASSISTANT]), Row("", "19"), Row("2+2=", "4")]
    made = [learning_all(tokenizer).fit(row, 100) for row in rows]
    batch = example_batch([Example("train:0", one.token_ids, one.loss_mask) for one in made])
    firsts = batch.offsets[:-1]
    assert not batch["loss_mask"][firsts].any()
    assert int(batch["loss_mask"].sum()) == batch.num_tokens - len(rows)
    assert torch.equal(batch["token_share"] > 0, batch["loss_mask"])


def test_a_sequence_of_one_token_teaches_nothing(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(BadRow, match="nothing to learn: fewer than 2 tokens"):
        learning_all(tokenizer).fit(Row([{"role": "user", "content": "a"}]), 100)


def test_a_conversation_without_the_assistant_teaches_nothing(tokenizer):
    with pytest.raises(BadRow, match="nothing to learn: no token is the assistant's"):
        LearnedRenderer(tokenizer, DataConfig()).fit(Row([USER]), 100)


def test_a_tokenizer_without_an_end_cannot_learn_responses(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token, so a response could never end"):
        LearnedRenderer(tokenizer, DataConfig()).fit(Row("a", "b"), 100)
