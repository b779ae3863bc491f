"""The policy endpoint with Anthropic's client: turns, tools, streams and errors."""

import textwrap

import pytest

HEAD = """
from anthropic import Anthropic
from engine_plugin_agents import endpoint

def solve(row, base_url, api_key):
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    user = {"role": "user", "content": "Add"}
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    given = {"model": "m", "max_tokens": 200, "system": [{"type": "text", "text": "Short."}]}
"""
CALL = 'So <tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call><|im_end|>'


@pytest.fixture
def solved(environment, scripted, requests, play):
    """solved(source, *texts): the rollout of a harness whose policy says these texts, and the metrics."""

    def run(source, *texts):
        source = HEAD + textwrap.indent(textwrap.dedent(source), "    ") + "\nmine = endpoint(solve)\n"
        runner, said = environment(source, max_tokens=2000, on_error="fail"), iter(texts)
        engine = scripted(lambda request: (next(said), "stop"))
        [rollout] = play(runner, engine, requests(1, max_response_tokens=300))
        return rollout, runner.metrics()

    return run


def test_tools_are_called_and_answered_without_encoding_them_again(solved, tokenizer):
    source = """
    message = client.messages.create(messages=[user], tools=tools, **given)
    text, call = message.content
    assert (text.text, call.name, call.input, message.stop_reason) == ("So", "add", {"numbers": [2, 3]}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
    more = {"role": "user", "content": [result, {"type": "text", "text": "Done?"}]}
    messages = [user, {"role": "assistant", "content": message.content}, more]
    message = client.messages.create(messages=messages, tools=tools, **given)
    assert (message.content[0].text, message.stop_reason, message.model) == ("Yes", "end_turn", "m")
    assert message.usage.output_tokens == 4
    """
    rollout, metrics = solved(source, CALL, "Yes<|im_end|>")
    text = tokenizer.decode(rollout.token_ids)
    assert text.startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nAdd<|im_end|>\n")
    assert text.endswith(
        f"{CALL}\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>user\nDone?<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
    )
    assert tokenizer.decode(rollout.token_ids[rollout.loss_mask]) == CALL + "Yes<|im_end|>"
    assert (metrics["environment/branches"], metrics["environment/reencoded_tokens"]) == (1, 0)


def test_a_stream_gives_text_and_calls_and_is_continued(solved):
    source = """
    def ask(*messages):
        with client.messages.stream(messages=messages, tools=tools, **given) as stream:
            text = "".join(stream.text_stream)
            return text, stream.get_final_message()
    text, message = ask(user)
    assert (text, message.content[1].input, message.stop_reason) == ("So", {"numbers": [2, 3]}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "5"}
    text, message = ask(user, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]})
    assert (text, message.stop_reason) == ("5", "end_turn")
    """
    rollout, metrics = solved(source, CALL, "5<|im_end|>")
    assert [m["role"] for m in rollout.messages] == ["assistant", "tool", "assistant"]
    assert (metrics["environment/branches"], metrics["environment/reencoded_tokens"]) == (1, 0)


def test_a_stop_sequence_is_named(solved):
    source = """
    message = client.messages.create(messages=[user], stop_sequences=["</b>", "</a>"], **given)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("<a>4", "stop_sequence", "</a>")
    """
    solved(source, "<a>4</a>")


def test_an_error_has_the_clients_form(solved):
    source = """
    try:
        client.messages.create(messages=[user, {"role": "assistant", "content": "I"}], **given)
    except Exception as error:
        assert (type(error).__name__, error.status_code) == ("BadRequestError", 400)
        assert error.body["error"]["message"] == "body: Value error, the last message must not be the assistant's"
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    try:
        client.messages.create(messages=[image], **given)
    except Exception as error:
        assert "found using 'type' does not match" in error.body["error"]["message"], error
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    try:
        client.messages.create(messages=[user], tools=[search], **given)
    except Exception as error:
        assert error.body["error"]["message"] == "tools.0.type: Input should be 'custom'"
    client.messages.create(messages=[user], tools=[{"type": "custom", **tools[0]}], **given)
    """
    solved(source, "ok")
