from __future__ import annotations

import pytest

from engine_core.config.models import DataConfig
from engine_core.data.layouts import Row
from engine_core.data.render import OverLong, Renderer
from engine_core.data.rows import BadRow
from engine_core.errors import DataError

USER = {"role": "user", "content": "What is 12 plus 7?"}


def test_text_is_rendered_as_it_is(tokenizer):
    rendered = Renderer(tokenizer, DataConfig()).fit(Row("What is 12 plus 7?"), 100)
    assert rendered.text == "What is 12 plus 7?"
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    assert rendered.messages is None


def test_a_conversation_is_rendered_with_the_template_and_asks_for_the_assistant(tokenizer):
    rendered = Renderer(tokenizer, DataConfig(system="Be brief")).fit(Row([USER]), 100)
    assert rendered.text == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhat is 12 plus 7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    assert rendered.messages == [{"role": "system", "content": "Be brief"}, USER]


def test_a_prompt_that_ends_in_the_assistants_words_goes_on_from_them(tokenizer):
    start = {"role": "assistant", "content": "The answer"}
    rendered = Renderer(tokenizer, DataConfig()).fit(Row([USER, start]), 100)
    assert rendered.text.endswith("<|im_start|>assistant\nThe answer")


def test_text_becomes_a_user_turn_where_the_template_is_asked_for(tokenizer):
    rendered = Renderer(tokenizer, DataConfig(chat_template=True)).fit(Row("hi"), 100)
    assert rendered.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_come_from_the_tokenizer_or_the_template_never_both(make_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer("<|im_start|>{{ messages[0]['content'] }}")
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", start), ("<|im_end|>", end)]
    )
    config = DataConfig()
    text = Renderer(tokenizer, config).fit(Row("one"), 100).token_ids
    chat = Renderer(tokenizer, config).fit(Row([{"role": "user", "content": "one"}]), 100).token_ids
    # The end that the tokenizer adds is left out: a prompt goes on.
    assert text == chat == [start, *tokenizer.encode("one", add_special_tokens=False)]


def test_conversations_without_a_template_are_refused(plain_tokenizer):
    with pytest.raises(DataError, match=r"The tokenizer has no chat template, .* rows are plain text"):
        Renderer(plain_tokenizer, DataConfig()).fit(Row([USER]), 100)


def test_a_template_that_is_turned_off_cannot_render_conversations(tokenizer):
    with pytest.raises(
        DataError, match=r"chat_template is false, but a row is a conversation. Remove the key"
    ):
        Renderer(tokenizer, DataConfig(chat_template=False)).fit(Row([USER]), 100)


@pytest.mark.parametrize(
    "keys", [{"system": "brief"}, {"system": ""}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_keys_of_a_template_over_plain_text_are_refused(tokenizer, keys):
    (key,) = keys
    with pytest.raises(DataError, match=rf"{key} needs a chat template.*Set chat_template = true"):
        Renderer(tokenizer, DataConfig(**keys)).fit(Row("hi"), 100)


def test_a_conversation_that_the_template_refuses_is_a_bad_row(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRow, match=r"the chat template refuses it \(roles must alternate\)"):
        Renderer(tokenizer, DataConfig()).fit(Row([USER]), 100)


def test_templates_run_in_the_sandbox(make_tokenizer):
    tokenizer = make_tokenizer("{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRow, match=r"the chat template refuses it .*unsafe"):
        Renderer(tokenizer, DataConfig()).fit(Row([USER]), 100)


def test_text_that_the_tokenizer_refuses_is_a_bad_row():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"one": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert Renderer(tokenizer, DataConfig()).fit(Row("one"), 9).token_ids == [0]
    with pytest.raises(BadRow, match=r"the tokenizer refuses it .*WordLevel error"):
        Renderer(tokenizer, DataConfig()).fit(Row("two"), 9)


def test_an_empty_prompt_is_a_bad_row(tokenizer):
    with pytest.raises(BadRow, match=r"the prompt is empty \(0 tokens\)"):
        Renderer(tokenizer, DataConfig()).fit(Row(""), 100)


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_prompt_over_the_limit_is_not_cut_unless_asked(tokenizer, policy):
    length = len(tokenizer.encode(USER["content"]))
    renderer = Renderer(tokenizer, DataConfig(over_long=policy))
    assert len(renderer.fit(Row(USER["content"]), length).token_ids) == length
    with pytest.raises(OverLong) as caught:
        renderer.fit(Row(USER["content"]), length - 1)
    assert caught.value.length == length
