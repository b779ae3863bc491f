"""Messages after a sampled turn get the tokens that the template writes for them in the whole conversation."""

import pytest

from engine_core.errors import DataError
from engine_plugin_agents.chat import encode, following

QUESTION = {"role": "user", "content": "6*7?"}
CALL = {"role": "assistant", "content": "<calc>6*7</calc>"}
NEW = [{"role": "tool", "content": "42"}, {"role": "user", "content": "Thanks. And half?"}]


def whole(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


@pytest.mark.parametrize("ended", [True, False])
def test_prompt_turn_and_answer_are_the_tokens_of_the_whole_conversation(tokenizer, ended):
    prompt = whole(tokenizer, [QUESTION])
    turn = encode(tokenizer, CALL["content"]) + [tokenizer.eos_token_id] * ended
    assert prompt + turn + following(tokenizer, NEW, ended) == whole(tokenizer, [QUESTION, CALL, *NEW])


def test_a_template_that_never_writes_the_end_works_too(tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    text = plain.decode(following(plain, NEW, True))
    assert text == "tool: 42\nuser: Thanks. And half?\nassistant: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (
            "{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}",
            "writes earlier messages differently once others follow",
        ),
    ],
)
def test_a_template_that_cannot_is_refused(tokenizer, template, message):
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(DataError, match=message):
        following(other, NEW, True)
