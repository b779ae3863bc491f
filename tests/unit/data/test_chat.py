"""Templates that behave like those of published families: prompts, turns, tools, learned spans, control tokens."""

import copy
import logging

import pytest
from chat_templates import FAMILIES, TEMPLATES, save, tokenizer_of
from transformers import AutoTokenizer

from engine_core.data import chat
from engine_core.data.chat import ChatFormat
from engine_core.data.rows import BadRow
from engine_core.errors import DataError

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
MORE, BYE = {"role": "user", "content": "More?"}, {"role": "assistant", "content": "Bye"}
RULE, ANSWER = {"role": "system", "content": "Rule"}, {"role": "tool", "content": "42"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {"q": "6*7"}}}
    ],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "123456789", "name": "f"}
FINAL = {"role": "assistant", "content": "It is 42"}
SCHEMA = {"type": "function", "function": {"name": "f", "description": "Computes", "parameters": {}}}
every = pytest.mark.parametrize("name", sorted(FAMILIES))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(name, **options): the tokenizer and the format of a family, loaded from a folder."""
    tokenizers = {}

    def make(name, **options):
        if name not in tokenizers:
            tokenizers[name] = AutoTokenizer.from_pretrained(save(name, tmp_path_factory.mktemp(name)))
        return tokenizers[name], ChatFormat(tokenizers[name], **options)

    return make


def turns(tokenizer, rendered):
    """Return the learned text, turns separated by a bar."""
    runs, previous = [], False
    for token, mask in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return "|".join(tokenizer.decode(run) for run in runs)


def test_every_template_is_of_a_family():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    assert len(FAMILIES) >= 20


@every
def test_a_prompt_is_what_the_template_writes(made, name):
    tokenizer, form = made(name)
    rendered = form.prompt([HI])
    assert rendered.text == FAMILIES[name].prompt
    assert rendered.token_ids == tokenizer.encode(FAMILIES[name].prompt, add_special_tokens=False)
    assert form.notes == set()


@every
def test_a_system_message_reaches_the_model(made, name):
    _, form = made(name)
    assert form.prompt([RULE, HI]).text == FAMILIES[name].system
    assert form.notes == set(FAMILIES[name].system_notes)


@every
def test_a_further_turn_follows_an_ended_turn(made, name):
    tokenizer, form = made(name)
    family = FAMILIES[name]
    sampled = tokenizer.encode(family.end.strip() or family.eos, add_special_tokens=False)
    assert tokenizer.decode(form.following([MORE], sampled)) == family.more
    other_end = form.following([MORE], [tokenizer.eos_token_id])  # that the template does not write
    assert tokenizer.decode(other_end) == (family.end if name == "glm4" else "") + family.more


@every
def test_a_further_turn_ends_a_turn_that_was_cut(made, name):
    tokenizer, form = made(name)
    sampled = tokenizer.encode("Hel", add_special_tokens=False)
    assert tokenizer.decode(form.following([MORE], sampled)) == FAMILIES[name].end + FAMILIES[name].more


@every
def test_the_answer_of_a_tool_follows(made, name):
    tokenizer, form = made(name)
    family = FAMILIES[name]
    sampled = tokenizer.encode(family.ended_with or family.end or family.eos, add_special_tokens=False)
    assert tokenizer.decode(form.following([ANSWER], sampled)) == family.tool
    assert form.notes == set(family.notes)


TWO = [{**ANSWER, "tool_call_id": f"call0000{i}", "name": f"tool_{i}"} for i in (1, 2)]


@every
@pytest.mark.parametrize("count", [1, 2])
def test_the_answers_of_named_calls_follow(made, name, count):
    """Some templates take the tool's name from the call, others allow one call in a turn."""
    tokenizer, form = made(name)
    family = FAMILIES[name]
    sampled = tokenizer.encode(family.ended_with or family.end or family.eos, add_special_tokens=False)
    text = tokenizer.decode(form.following(TWO[:count], sampled))
    if count == 1:
        assert text == family.tool.replace("functions.f ", "functions.tool_1 ").replace(
            "response:f", "response:tool_1"
        )
    assert text.count("42") == count
    if name == "gemma4":
        assert f"response:tool_{count}" in text
    if name == "mistral_tools":
        assert f'"call_id": "call0000{count}"' in text


@every
def test_several_messages_follow(made, name):
    tokenizer, form = made(name)
    two = [ANSWER, {"role": "tool", "content": "43"}, MORE]
    text = tokenizer.decode(form.following(two, [tokenizer.eos_token_id]))
    assert text.index("42") < text.index("43") < text.index("More?")
    if name in ("gemma2", "gemma3", "llama2", "mistral_inst"):
        assert form.notes == {chat.NOTES[chat.TOOL], chat.NOTES[chat.MERGE]}


@every
def test_the_assistants_turns_are_learned_with_their_ends(made, name):
    tokenizer, form = made(name)
    rendered = form.conversation([HI, HELLO, MORE, BYE])
    family = FAMILIES[name]
    assert rendered.text == family.whole
    assert rendered.token_ids == tokenizer.encode(family.whole, add_special_tokens=False)
    assert turns(tokenizer, rendered) == family.learned


@every
def test_only_the_response_is_learned_after_a_prompt(made, name):
    tokenizer, form = made(name)
    rendered = form.conversation([HI, HELLO, MORE, BYE], first=3)
    assert "Hello" not in turns(tokenizer, rendered)
    assert FAMILIES[name].learned.endswith(turns(tokenizer, rendered))
    assert "Bye" in turns(tokenizer, rendered)


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.calls))
def test_calls_are_learned_and_answers_are_not(made, name):
    tokenizer, form = made(name)
    rendered = form.conversation([HI, CALL, RESULT, FINAL], tools=[SCHEMA])
    assert turns(tokenizer, rendered) == FAMILIES[name].calls
    if name not in ("deepseek_v3", "gemma4", "glm4"):
        assert "Computes" in rendered.text
    else:
        assert form.notes == {"tools are left out"}


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if not family.calls))
def test_a_template_that_leaves_calls_out_does_not_lose_them_silently(made, name):
    with pytest.raises(BadRow, match=r"the chat template (leaves out a message of the role|refuses it)"):
        made(name)[1].conversation([HI, CALL, RESULT, FINAL])


@every
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_text_from_outside_cannot_write_control_tokens(made, name, role):
    tokenizer, form = made(name)
    family = FAMILIES[name]
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    forged = "".join((*family.special, *family.added))
    if role == "system":
        ids = form.prompt([{"role": role, "content": forged}, HI]).token_ids
        plain = form.prompt([{"role": role, "content": "@"}, HI]).token_ids
    else:
        ids = form.following([{"role": role, "content": forged}], [tokenizer.eos_token_id])
        plain = form.following([{"role": role, "content": "@"}], [tokenizer.eos_token_id])
    control = {
        tokenizer.convert_tokens_to_ids(token)
        for token in (*family.special, *(added for added in family.added if added in source))
    }
    assert [i for i in ids if i in control] == [i for i in plain if i in control]
    assert tokenizer.decode(ids) == tokenizer.decode(plain).replace("@", forged)


@every
def test_the_assistant_of_a_row_cannot_write_special_tokens(made, name):
    tokenizer, form = made(name)
    forged = "".join(FAMILIES[name].special)
    first = form.conversation([HI, {"role": "assistant", "content": "a" + forged + "b"}])
    plain = form.conversation([HI, {"role": "assistant", "content": "axb"}])
    special = set(tokenizer.convert_tokens_to_ids(list(FAMILIES[name].special)))
    assert [i for i in first.token_ids if i in special] == [i for i in plain.token_ids if i in special]
    assert turns(tokenizer, first) == turns(tokenizer, plain).replace("axb", f"a{forged}b")


def test_the_assistant_of_a_row_may_think(made):
    tokenizer, form = made("qwen3")
    rendered = form.conversation([HI, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHello"}])
    assert turns(tokenizer, rendered) == "<think>\nHm\n</think>\n\nHello<|im_end|>"
    assert {*tokenizer.convert_tokens_to_ids(["<think>", "</think>"])} < {*rendered.token_ids}


def test_thinking_that_the_template_drops_is_not_learned(made):
    tokenizer, form = made("qwen3")
    thought = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHello"}
    assert turns(tokenizer, form.conversation([HI, thought, MORE, BYE])) == FAMILIES["qwen3"].learned
    tokenizer, form = made("deepseek_r1")
    assert turns(tokenizer, form.conversation([HI, thought])) == "\n\nHello<｜end▁of▁sentence｜>"


def test_a_block_that_the_prompt_opens_is_not_learned(made):
    tokenizer, form = made("qwen3_5")
    thought = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHello"}
    assert turns(tokenizer, form.conversation([HI, thought])) == "Hm\n</think>\n\nHello<|im_end|>"


def test_arguments_of_the_template_switch_thinking_off_in_prompts_and_further_turns(made):
    (tokenizer, thinks), (_, quiet) = made("qwen3"), made("qwen3", arguments={"enable_thinking": False})
    empty = "<think>\n\n</think>\n\n"
    assert quiet.prompt([HI]).text == thinks.prompt([HI]).text + empty
    ends = [tokenizer.eos_token_id]
    assert tokenizer.decode(quiet.following([MORE], ends)).endswith(empty)
    assert empty not in tokenizer.decode(thinks.following([MORE], ends))


def test_control_tokens_are_recognized_on_request_and_it_is_logged(made, caplog):
    chat._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "engine"):
        tokenizer, form = made("qwen2_5", control_tokens="allow")
        made("qwen2_5", control_tokens="allow")
    assert [record.message for record in caplog.records] == [
        '[data] control_tokens = "allow": text of messages can forge roles and ends of turns'
    ]
    forged = form.prompt([{"role": "user", "content": "a<|im_end|>b"}])
    assert forged.token_ids.count(tokenizer.eos_token_id) == 3
    assert (
        made("qwen2_5")[1]
        .prompt([{"role": "user", "content": "a<|im_end|>b"}])
        .token_ids.count(tokenizer.eos_token_id)
        == 2
    )


@pytest.mark.parametrize("allowed", ["text", "allow"])
def test_text_cannot_write_placeholders(made, allowed):
    tokenizer, form = made("qwen2_5", control_tokens=allowed)
    text = "a\ue0000\ue001b\ue00099\ue001 <|im_end|>\ue000"
    rendered = form.prompt([{"role": "user", "content": text}])
    assert text in rendered.text
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    assert tokenizer.decode(form.text(text)) == text


def test_roles_arguments_and_tools_cannot_write_control_tokens(made):
    tokenizer, form = made("qwen2_5")
    end = "x<|im_end|>"
    call = {**CALL, "tool_calls": [{"function": {"name": end, "arguments": {end: end, "n": [end]}}}]}
    messages = [HI, call, {"role": "tool", "content": end}, {"role": end, "content": "a"}]
    ids = form.prompt(messages, tools=[{"name": end, "of": {end: end}}]).token_ids
    plain = "x"
    call = {**CALL, "tool_calls": [{"function": {"name": plain, "arguments": {plain: plain, "n": [plain]}}}]}
    messages = [HI, call, {"role": "tool", "content": plain}, {"role": plain, "content": "a"}]
    expected = form.prompt(messages, tools=[{"name": plain, "of": {plain: plain}}]).token_ids
    assert ids.count(tokenizer.eos_token_id) == expected.count(tokenizer.eos_token_id)


def test_a_stop_token_that_is_special_ends_a_turn(made):
    tokenizer, form = made("llama3")
    begin = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert tokenizer.decode(form.following([MORE], [begin])).startswith("<|eot_id|>")
    assert not tokenizer.decode(form.following([MORE], [begin], stops=[begin])).startswith("<|eot_id|>")


def test_a_prompt_that_ends_in_the_assistants_words_is_continued(made):
    _, form = made("llama3")
    rendered = form.prompt([HI, {"role": "assistant", "content": "The <|eot_id|>"}])
    assert rendered.text.endswith("<|end_header_id|>\n\nThe <|eot_id|>")


def test_a_first_message_of_the_assistant_is_not_learned(made):
    tokenizer, form = made("phi4")
    assert turns(tokenizer, form.conversation([HELLO, MORE, BYE])) == "Bye<|im_end|>"


def test_white_space_that_a_template_trims_does_not_matter(made):
    tokenizer, form = made("llama3")
    spaced = [{**m, "content": f" {m['content']}\n"} for m in (HI, HELLO, MORE, BYE)]
    assert turns(tokenizer, form.conversation(spaced)) == FAMILIES["llama3"].learned


def test_calls_with_other_arguments_are_learned(made):
    tokenizer, form = made("qwen2_5")
    for arguments, text in (
        ({"n": 1}, '{"n": 1}'),
        ({"a": "x", "n": [2]}, '{"a": "x", "n": [2]}'),
        ({}, "{}"),
    ):
        call = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        learned = turns(tokenizer, form.conversation([HI, call]))
        assert learned == f'\n<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("arguments", [{"q": "6*7"}, '{"q": "6*7"}'], ids=["mapping", "text"])
@pytest.mark.parametrize("wanted", ["mapping", "text", "items", "only a mapping", "only text"])
@pytest.mark.parametrize("refuses_tools", [False, True], ids=["", "refuses the tool role"])
def test_arguments_of_calls_are_of_the_type_that_the_template_shows_right(
    made, wanted, arguments, refuses_tools
):
    """As JSON by the template, as they are, or one by one: both types of a row give the same tokens."""
    tokenizer, _ = made("qwen2_5")
    shown = "(call.function.arguments | tojson)"
    other = {
        "mapping": shown,
        "text": "call.function.arguments",
        "items": "call.function.arguments.items() | map('join', '=') | join",
        "only a mapping": f"{shown} if call.function.arguments is mapping else ''",
        "only text": "call.function.arguments if call.function.arguments is string else ''",
    }[wanted]
    assert shown in tokenizer.chat_template
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = tokenizer.chat_template.replace(shown, f"({other})")
    if refuses_tools:
        refusal = "{%- for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{%- endfor %}"
        changed.chat_template = refusal + changed.chat_template
    call = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    learned = turns(changed, ChatFormat(changed).conversation([HI, call]))
    found = "q=6*7" if wanted == "items" else '{"q": "6*7"}'
    assert learned == f'\n<tool_call>\n{{"name": "f", "arguments": {found}}}\n</tool_call><|im_end|>'


def test_rows_with_both_types_of_arguments_are_rendered_alike(made):
    """What was found for a row with a mapping holds for a row with text."""
    tokenizer, _ = made("qwen2_5")
    changed = copy.deepcopy(tokenizer)
    shown = "(call.function.arguments | tojson)"
    changed.chat_template = tokenizer.chat_template.replace(
        shown, f"({shown} if call.function.arguments is mapping else '')"
    )
    form = ChatFormat(changed)
    calls = [
        {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": a}}]}
        for a in ({"q": "1"}, '{"q": "1"}')
    ]
    first, second = (form.conversation([HI, call]) for call in calls)
    assert first.token_ids == second.token_ids
    assert form.prompt([HI, calls[1], MORE]).text == form.prompt([HI, calls[0], MORE]).text


def test_a_call_without_arguments_gets_none(made):
    tokenizer, _ = made("qwen2_5")
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = tokenizer.chat_template.replace(
        "(call.function.arguments | tojson)", "('none' if 'arguments' not in call.function else 'some')"
    )
    call = {**CALL, "tool_calls": [{"function": {"name": "f"}}]}
    assert '"arguments": none' in ChatFormat(changed).prompt([HI, call, MORE]).text


def test_a_system_message_without_text_is_no_obstacle(made):
    for name in sorted(FAMILIES):
        tokenizer, form = made(name)
        rendered = form.conversation([{"role": "system", "content": ""}, HI, HELLO])
        assert "Hello" in turns(tokenizer, rendered), name
        assert "Hi" not in turns(tokenizer, rendered), name
    assert (
        made("mistral_inst")[1].prompt([{"role": "system", "content": ""}, HI]).text == "<s>[INST] Hi [/INST]"
    )


def test_what_cannot_follow_is_refused_with_a_way_out(made):
    tokenizer, _ = made("qwen2_5")
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(
        DataError, match=r"leaves out a message of the role .*episode\.append.*check-template"
    ):
        ChatFormat(tokenizer).following([MORE], [])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="The tokenizer has no chat template"):
        ChatFormat(tokenizer).following([MORE], [])


def test_a_template_that_renders_earlier_turns_differently_can_be_learned():
    tokenizer = tokenizer_of("no_end")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert turns(tokenizer, ChatFormat(tokenizer).conversation([HI, HELLO, MORE, BYE])) == "Hello|Bye"


def test_a_template_that_changes_contents_cannot_be_learned():
    tokenizer = tokenizer_of("no_end")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] | length }}:{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(BadRow, match=r"differently if they have more text.*\{% generation %\} marks"):
        ChatFormat(tokenizer).conversation([HI, HELLO])
