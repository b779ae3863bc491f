"""The policy endpoint with the responses of OpenAI's client: turns, tools, streams and errors."""

import textwrap

import pytest

HEAD = """
from openai import OpenAI
from engine_plugin_agents import endpoint

def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    user = {"role": "user", "content": [{"type": "input_text", "text": "Add"}]}
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    given = {"model": "m", "instructions": "Short.", "tools": tools}
"""
CALL = 'So <tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call><|im_end|>'


@pytest.fixture
def solved(environment, scripted, requests, play):
    """solved(source, *texts): the rollout of a harness whose policy says these texts, the metrics, and the requests."""

    def run(source, *texts):
        source = HEAD + textwrap.indent(textwrap.dedent(source), "    ") + "\nmine = endpoint(solve)\n"
        runner, said = environment(source, max_tokens=2000, on_error="fail"), iter(texts)
        engine = scripted(lambda request: (next(said), "stop"))
        [rollout] = play(runner, engine, requests(1, max_response_tokens=300))
        return rollout, runner.metrics(), engine.asked

    return run


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered_without_encoding_them_again(solved, tokenizer, streamed):
    source = f"""
    def ask(items):
        if not {streamed}:
            return client.responses.create(input=items, **given)
        with client.responses.stream(input=items, **given) as stream:
            seen = [event.type for event in stream]
            assert [seen[0], seen[-1]] == ["response.created", "response.completed"], seen
            return stream.get_final_response()
    items = [user]
    response = ask(items)
    message, call = response.output
    assert (message.content[0].text, call.name, call.arguments) == ("So", "add", '{{"numbers": [2, 3]}}')
    items += [item.model_dump(exclude={{"parsed_arguments"}}) for item in response.output]
    items[1]["content"][0].pop("parsed", None)
    items.append({{"type": "function_call_output", "call_id": call.call_id, "output": "5"}})
    response = ask(items)
    assert (response.output_text, response.status, response.usage.output_tokens) == ("Yes", "completed", 4)
    """
    rollout, metrics, _ = solved(source, CALL, "Yes<|im_end|>")
    text = tokenizer.decode(rollout.token_ids)
    assert text.startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nAdd<|im_end|>\n")
    assert text.endswith(f"{CALL}\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>")
    assert tokenizer.decode(rollout.token_ids[rollout.loss_mask]) == CALL + "Yes<|im_end|>"
    assert (metrics["environment/branches"], metrics["environment/reencoded_tokens"]) == (1, 0)


def test_a_text_is_a_users_message_and_a_cut_turn_is_incomplete(solved):
    source = """
    response = client.responses.create(model="m", input="Hi", max_output_tokens=3)
    assert response.output_text == "abc"
    """
    _, _, [asked] = solved(source, "abcd")
    assert asked.sampling.max_response_tokens == 3


def test_what_is_not_supported_is_refused(solved):
    source = """
    def refused(**changed):
        try:
            client.responses.create(**{"input": [user], **given, **changed})
        except Exception as error:
            return error.status_code, error.body["message"]
    expected = {
        "must not be the assistant's": {"input": [user, {"role": "assistant", "content": "I"}]},
        "previous_response_id: Input should be null": {"previous_response_id": "resp_1"},
        "does not match any of the expected tags: 'message'": {"input": [user, {"type": "item_reference", "id": "x"}]},
        "tools.0.type: Input should be 'function'": {"tools": [{"type": "web_search"}]},
        "List should have at least 1 item": {"input": []},
        "text.format.type: Input should be 'text'": {"text": {"format": {"type": "json_object"}}},
    }
    for text, changed in expected.items():
        status, message = refused(**changed)
        assert (status, text in message) == (400, True), message
    text = {"format": {"type": "text"}, "verbosity": "low"}
    client.responses.create(input=[user, {"type": "reasoning", "id": "r", "summary": []}], text=text, **given)
    """
    solved(source, "ok")
