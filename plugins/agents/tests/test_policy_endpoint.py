"""The policy endpoint: harnesses that talk to it with the OpenAI client, and what of their episodes is learned."""

import textwrap
import time
import zlib

import pytest

from engine_core.errors import PluginError

HEAD = """
import httpx
from openai import OpenAI, AsyncOpenAI
from engine_plugin_agents import endpoint

SPEC = {"rewards": frozenset({"good"})}

"""
TAIL = "\nmine = endpoint(solve)\n"
TWO_TURNS = """
def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]
    for number in range(2):
        answer = client.chat.completions.create(model="any", messages=messages, temperature=0.3)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"Why {number}?"}]
    return {"good": float(row["number"])}
"""


@pytest.fixture
def harness(environment):
    """harness(source, **settings): the runner of an environment whose source defines the harness ``solve``."""
    return lambda source, **settings: environment(HEAD + source + TAIL, max_tokens=4000, **settings)


def test_the_sampled_tokens_of_a_client_are_learned_as_they_were_sampled(
    harness, scripted, requests, play, tokenizer
):
    engine = scripted()
    engine.version = 7
    runner = harness(TWO_TURNS)
    rollouts = play(runner, engine, requests(4))
    by_id = {request.id: request for request in engine.asked}
    for rollout in rollouts:
        group = rollout.group_id
        written = f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nQ{group}<|im_end|>\n<|im_start|>assistant\n"
        expected, mask, log_probs = [], [], []
        for number, text in enumerate(
            [written, "<|im_end|>\n<|im_start|>user\nWhy 0?<|im_end|>\n<|im_start|>assistant\n"], 1
        ):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            request = by_id[f"{rollout.request_id}:{number}"]
            assert request.prompt.token_ids == expected + ids
            answer = engine.answer(request)
            said = answer.token_ids[len(expected) + len(ids) :]
            log_probs += [0.0] * len(ids) + answer.rollout_log_probs[-len(said) :].tolist()
            mask += [False] * len(ids) + [True] * len(said)
            expected += ids + said.tolist()
        assert rollout.token_ids.tolist() == expected
        assert rollout.loss_mask.tolist() == mask
        assert rollout.rollout_log_probs.tolist() == log_probs
        assert rollout.policy_versions.tolist() == [7 * m for m in mask]
        assert rollout.prompt.token_ids == tokenizer(written, add_special_tokens=False)["input_ids"]
        assert rollout.prompt.text == f"Q{group}"
        assert rollout.rewards == {"good": float(group)}
        assert [m["role"] for m in rollout.messages] == ["assistant", "user", "assistant"]
        assert rollout.finish_reason == "stop"
    metrics = runner.metrics()
    assert metrics["environment/reencoded_tokens"] == 0
    assert metrics["environment/branches"] == 4


def one(rollouts):
    [rollout] = rollouts
    return rollout


def said_by(tokenizer, rollout):
    """The text that is learned."""
    return tokenizer.decode(rollout.token_ids[rollout.loss_mask])


def test_a_changed_history_begins_a_branch_and_all_branches_are_learned(
    harness, scripted, requests, play, tokenizer
):
    source = """
    def solve(row, base_url, api_key):
        client = OpenAI(base_url=base_url, api_key=api_key)
        def ask(*messages):
            return client.chat.completions.create(model="", messages=messages).choices[0].message.model_dump()
        user = {"role": "user", "content": "Hi"}
        first = ask(user)
        ask({"role": "user", "content": "A title?"})
        second = ask(user, first, user)
        ask(user, {"role": "assistant", "content": "I said"}, user)
        again = ask(user, {"role": "assistant", "content": f" {first['content']}\\n"}, user)
        return {"good": float(len(second["content"]))}
    """
    texts = iter(["one", "two", "three", "four", "five"])
    runner = harness(textwrap.dedent(source))
    engine = scripted(lambda request: (next(texts) + "<|im_end|>", "stop"))
    rollout = one(play(runner, engine, requests(1, max_response_tokens=50)))
    assert said_by(tokenizer, rollout) == "one<|im_end|>five<|im_end|>"
    others = [said_by(tokenizer, branch) for branch in rollout.branches]
    assert others == ["two<|im_end|>", "three<|im_end|>", "four<|im_end|>"]  # "one" is learned once
    shared = rollout.branches[1]
    assert tokenizer.decode(shared.token_ids).count("one<|im_end|>") == 1
    assert not shared.rollout_log_probs[~shared.loss_mask].any()
    assert {branch.prompt.id for branch in rollout.branches} == {rollout.prompt.id}
    assert rollout.extras["turns"][rollout.loss_mask].unique().tolist() == [1, 5]
    assert rollout.rewards["good"] == len("three")
    metrics = runner.metrics()
    assert metrics["environment/branches"] == 4
    assert metrics["environment/reencoded_tokens"] == len("I said")


def test_equal_requests_at_once_are_different_turns(harness, scripted, requests, play):
    source = """
    import asyncio
    async def solve(row, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            ask = lambda: client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}])
            answers = await asyncio.gather(*(ask() for _ in range(6)))
        return {"good": float(len({answer.id for answer in answers}))}
    """
    runner = harness(textwrap.dedent(source), max_turns=6)
    rollouts = play(runner, scripted(), requests(4, max_response_tokens=3))
    assert [r.rewards["good"] for r in rollouts] == [6.0] * 4
    assert runner.metrics()["environment/branches"] == 24


TOOLS = """
def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": "Add"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    turns = 0
    while turns < 3:
        turns += 1
        choice = client.chat.completions.create(model="", messages=messages, tools=tools).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            total = sum(json.loads(call.function.arguments)["numbers"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    return {"good": float(choice.message.content == "5")}
"""


def test_tool_calls_are_returned_and_answered_without_encoding_them_again(
    harness, scripted, requests, play, tokenizer
):
    call = 'So: <tool_call>\n{"name":"add","arguments":{"numbers":[2,3]}}</tool_call><|im_end|>'
    texts = iter([call, "5<|im_end|>"])
    runner = harness("import json\n" + TOOLS)
    engine = scripted(lambda request: (next(texts), "stop"))
    rollout = one(play(runner, engine, requests(1, max_response_tokens=200)))
    assert said_by(tokenizer, rollout) == call + "5<|im_end|>"
    assert rollout.rewards["good"] == 1.0
    assert [m["role"] for m in rollout.messages] == ["assistant", "tool", "assistant"]
    metrics = runner.metrics()
    assert metrics["environment/tool_calls"] == metrics["environment/branches"] == 1
    assert metrics["environment/reencoded_tokens"] == 0


def test_a_call_that_cannot_be_read_stays_text(harness, scripted, requests, play):
    runner = harness("import json\n" + TOOLS)
    engine = scripted(lambda request: ("<tool_call>{add}</tool_call>", "stop"))
    rollout = one(play(runner, engine, requests(1, max_response_tokens=200)))
    assert (rollout.failure, rollout.rewards["good"]) == ("", 0.0)
    assert len(engine.asked) == 1


ASK = """
def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": "Hi"}]
    %s
"""


def test_max_tokens_and_stop_strings_are_those_of_the_request(harness, scripted, requests, play):
    source = """
    answer = client.chat.completions.create(
        model="m", messages=messages, max_completion_tokens=10, stop=["</a>"], max_tokens=9
    )
    assert (answer.choices[0].message.content, answer.model) == ("<a>4", "m")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")
"""
    engine = scripted(lambda request: ("<a>4</a> and", "length"))
    rollout = one(play(harness(ASK % source.strip()), engine, requests(1, temperature=0.7)))
    assert rollout.failure == ""
    [asked] = engine.asked
    assert (asked.sampling.max_response_tokens, asked.sampling.stop) == (10, ("</a>",))
    assert asked.sampling.temperature == 0.7  # the run's


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"data": b'{"messages": ['}, (400, "invalid_request", "body: Invalid JSON: EOF")),
        ({"data": b"[" * 100_000}, (400, "invalid_request", "body: Invalid JSON: recursion limit")),
        ({"data": b""}, (400, "invalid_request", "body: Invalid JSON")),
        ({"json": {"messages": []}}, (400, "invalid_request", "messages: List should have at least 1")),
        ({"json": {"messages": "Hi"}}, (400, "invalid_request", "messages: Input should be a valid array")),
        (
            {"json": {"messages": [{"role": "wizard"}]}},
            (400, "invalid_request", "messages.0.role: Input should be 'system'"),
        ),
        (
            {"json": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}},
            (400, "invalid_request", "Input should be 'text'"),
        ),
        (
            {"json": {"messages": [{"role": "assistant", "content": "I"}]}},
            (400, "invalid_request", "must not be the assistant's"),
        ),
        ({"json": {"n": 2}}, (400, "invalid_request", "n: Input should be 1")),
        (
            {"json": {"response_format": {"type": "json_object"}}},
            (400, "invalid_request", "response_format.type: Input should be 'text'"),
        ),
        ({"json": {"max_tokens": 0}}, (400, "invalid_request", "max_tokens: Input should be greater than 0")),
        ({"data": b" " * (16 * 2**20 + 1)}, (413, "request_entity_too_large", "Maximum request body size")),
        (
            {"headers": {"Authorization": "Bearer sk-0-wrong"}},
            (401, "invalid_api_key", "not that of an episode"),
        ),
        (
            {"headers": {"Authorization": b"Bearer sk-0-\xff"}},
            (401, "invalid_api_key", "not that of an episode"),
        ),
        ({"headers": {"Authorization": ""}}, (401, "invalid_api_key", "not that of an episode")),
        (
            {"path": "/completions"},
            (404, "not_found", "/v1/completions is not served. The endpoint serves /v1/models"),
        ),
        ({"path": "/models"}, (405, "method_not_allowed", "405")),
    ],
)
def test_a_bad_request_gets_an_error_and_harms_nothing(
    harness, scripted, requests, play, arguments, expected
):
    source = f"""
def solve(row, base_url, api_key):
    given = {arguments!r}
    body = {{"messages": [{{"role": "user", "content": "Hi"}}]}}
    send = {{"headers": {{"Authorization": f"Bearer {{api_key}}"}}}} | given
    path = send.pop("path", "/chat/completions")
    if "data" in send:
        send["content"] = send.pop("data")
    else:
        send["json"] = body | send.get("json", {{}})
    found = httpx.post(base_url + path, **send)
    status, code, text = {expected!r}
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (status, code), found.text
    assert text in error["message"], error["message"]
    client = OpenAI(base_url=base_url, api_key=api_key)
    client.chat.completions.create(model="", **body)
"""
    rollout = one(play(harness(source, on_error="fail"), scripted(), requests(1)))
    assert rollout.loss_mask.any()


def test_a_key_is_valid_until_its_episode_ends(harness, scripted, requests, play):
    source = """
keys = []

def solve(row, base_url, api_key):
    status = []
    for key in [*keys, api_key]:
        client = OpenAI(base_url=base_url, api_key=key, max_retries=0)
        if key == api_key:
            assert client.models.list().data[0].id == "policy"
        try:
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}])
        except Exception as error:
            status.append((error.status_code, error.body["code"]))
    keys.append(api_key)
    assert status == [(401, "session_over")] * (len(keys) - 1), status
"""
    runner = harness(source, max_concurrent=1, on_error="fail")
    engine = scripted()
    play(runner, engine, requests(3))
    assert len(engine.asked) == 3


def test_a_client_that_disconnects_costs_only_its_turn(harness, scripted, requests, play, tokenizer):
    source = """
    try:
        client.with_options(timeout=0.2).chat.completions.create(model="", messages=messages)
    except Exception as error:
        assert type(error).__name__ == "APITimeoutError", error
    client.chat.completions.create(model="", messages=messages)
"""

    def script(request):
        if request.id.endswith(":1"):
            time.sleep(0.6)
        return "ab", "stop"

    runner = harness(ASK % source.strip(), on_error="fail")
    rollout = one(play(runner, scripted(script), requests(1)))
    assert said_by(tokenizer, rollout) == "ab"
    assert rollout.extras["turns"].max() == 2
    assert runner.metrics()["environment/branches"] == 1


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"max_turns": 1}, (403, "turn_limit_reached")), ({"max_tokens": 60}, (400, "context_length_exceeded"))],
)
@pytest.mark.parametrize("catches", [False, True])
def test_a_harness_without_budget_left_is_truncated_if_it_fails(
    environment, scripted, requests, play, settings, code, catches
):
    source = f"""
    client.chat.completions.create(model="", messages=messages)
    try:
        client.chat.completions.create(model="", messages=messages + [{{"role": "user", "content": "H" * 40}}])
    except Exception as error:
        assert (error.status_code, error.body["code"]) == {code}
        if {catches}:
            return {{"good": 0.5}}
        raise
"""
    runner = environment(HEAD + ASK % source.strip() + TAIL, **settings)
    rollout = one(play(runner, scripted(), requests(1, max_response_tokens=4)))
    assert rollout.failure == ""
    assert rollout.loss_mask.any()
    assert rollout.rewards == {"good": 0.5 if catches else 0.0}
    assert runner.metrics()["environment/truncated"] == (not catches)


def test_a_first_request_that_is_too_long_truncates_the_episode(environment, scripted, requests, play):
    source = """
    try:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": "H" * 300}])
    except Exception as error:
        assert error.body["code"] == "context_length_exceeded"
"""
    runner = environment(HEAD + ASK % source.strip() + TAIL, max_tokens=200)
    rollout = one(play(runner, scripted(), requests(1)))
    assert (rollout.failure, rollout.finish_reason, rollout.rewards) == ("", "length", {"good": 0.0})
    assert runner.metrics()["environment/truncated"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise ValueError('broken')", "ValueError: broken"),
        ("return 0.5", "a harness must return a dict of rewards by name, or None; it returned 0.5 (float)"),
        ("return {'goods': 1}", "reward 'goods' is not declared"),
        ("import sys; sys.exit(3)", "RuntimeError: SystemExit: 3"),
    ],
)
def test_a_harness_that_fails_is_an_error_of_its_episode(
    harness, scripted, requests, play, caplog, line, message
):
    source = (
        f"client.chat.completions.create(model='', messages=messages)\n    if row['number']:\n        {line}"
    )
    runner = harness(ASK % source, max_failure_share=0.5)
    rollouts = play(runner, scripted(), requests(4))
    assert [r.failure for r in rollouts] == ["", "", "error", "error"]
    assert message in caplog.text


def test_a_harness_with_other_arguments_is_refused_before_the_run(harness):
    message = (
        r"harness 'solve' must be callable as solve\(row=, base_url=, api_key=\): missing a required.*'url'"
    )
    with pytest.raises(PluginError, match=message):
        harness("def solve(row, url, api_key): pass")


def test_a_harness_that_never_asks_is_an_error(harness, scripted, requests, play, caplog):
    rollout = one(play(harness(ASK % "return None", max_failure_share=1), scripted(), requests(1)))
    assert rollout.failure == "error"
    assert "has not asked the policy" in caplog.text


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_harness_that_hangs_ends_at_the_time_limit(harness, scripted, requests, play, kind):
    hangs = "time.sleep(30)" if kind == "def" else "await asyncio.sleep(30)"
    source = f"""
import asyncio, time
{kind} solve(row, base_url, api_key):
    {hangs}
"""
    runner = harness(source, timeout_seconds=0.5, max_failure_share=1)
    start = time.monotonic()
    assert one(play(runner, scripted(), requests(1))).failure == "timeout"
    assert time.monotonic() - start < 10
    assert runner.metrics()["environment/timeouts"] == 1


def test_a_request_in_flight_at_the_time_limit_is_refused(harness, scripted, requests, play, tmp_path):
    source = """
def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    try:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}])
    except Exception as error:
        (Path(__file__).parent / "found").write_text(f"[{error.status_code}]")
"""
    runner = harness("from pathlib import Path\n" + source, timeout_seconds=0.5, max_failure_share=1)

    def script(request):
        time.sleep(1.5)
        return "ab", "stop"

    assert one(play(runner, scripted(script), requests(1))).failure == "timeout"
    assert (tmp_path / "found").read_text() == "[401]"


def test_a_flood_of_requests_ends_the_episode(harness, scripted, requests, play, caplog):
    source = """
    for number in range(100_000):
        httpx.post(base_url + "/chat/completions", headers={"Authorization": f"Bearer {api_key}"}, content=b"{")
"""
    rollout = one(play(harness(ASK % source.strip(), max_failure_share=1), scripted(), requests(1)))
    assert rollout.failure == "error"
    assert "the harness sent more than 100 requests that were refused" in caplog.text


def test_too_many_requests_at_once_are_refused(harness, scripted, requests, play):
    source = """
import asyncio
async def solve(row, base_url, api_key):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, limits=limits) as client:
        ask = lambda: client.post(base_url + "/chat/completions", json=body)
        answers = await asyncio.gather(*(ask() for _ in range(100)))
    status = [answer.status_code for answer in answers]
    assert set(status) == {200, 429}, status
    return {"good": float(status.count(200))}
"""

    def script(request):
        time.sleep(0.02)
        return "ab", "stop"

    runner = harness(source, max_turns=1000, on_error="fail")
    assert one(play(runner, scripted(script), requests(1))).rewards["good"] >= 64


def test_a_stream_gives_the_whole_turn_and_is_continued(harness, scripted, requests, play):
    source = """
    def turn():
        stream = client.chat.completions.create(
            model="", messages=messages, stream=True, stream_options={"include_usage": True}, tools=tools
        )
        return list(stream)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    *parts, usage = turn()
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hm"
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    [call] = parts[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "f", '{"x": 1}')
    assert usage.usage.completion_tokens > 2
    told = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    messages += [{"role": "assistant", "content": "Hm", "tool_calls": [told]}, {"role": "tool", "content": "1"}]
    assert turn()[0].choices[0].delta.content == "ok"
"""
    texts = iter(['Hm <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "ok"])
    runner = harness(ASK % source.strip(), on_error="fail")
    engine = scripted(lambda request: (next(texts), "stop"))
    play(runner, engine, requests(1, max_response_tokens=100))
    metrics = runner.metrics()
    assert (metrics["environment/branches"], metrics["environment/reencoded_tokens"]) == (1, 0)


def test_a_thousand_sessions_at_once_lose_and_double_no_turn(harness, scripted, requests, play):
    source = """
import zlib, aiohttp

async def solve(row, base_url, api_key):
    messages, heard = [{"role": "user", "content": row["prompt"]}], ""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for number in range(3):
            async with client.post(base_url + "/chat/completions", json={"messages": messages}) as found:
                message = (await found.json())["choices"][0]["message"]
            heard += message["content"]
            messages += [message, {"role": "user", "content": str(number)}]
    return {"good": float(zlib.crc32(heard.encode()))}
"""
    engine, runner = scripted(per_step=64), harness(source, on_error="fail", timeout_seconds=300)
    rollouts = play(runner, engine, requests(1000, max_response_tokens=12))
    assert engine.most > 500  # the sessions were in progress at the same time
    asked = [request.id for request in engine.asked]
    assert len(asked) == len(set(asked)) == 3000
    for rollout in rollouts:
        said = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
        assert rollout.rewards["good"] == zlib.crc32("".join(said).encode())
        assert rollout.extras["turns"].max() == 3
    metrics = runner.metrics()
    assert metrics["environment/branches"] == 1000
    assert metrics["environment/reencoded_tokens"] == 0


def test_equal_answers_to_equal_requests_keep_their_own_log_probs(harness, scripted, requests, play):
    source = "for _ in range(3):\n        client.chat.completions.create(model='', messages=messages)"
    runner, engine = harness(ASK % source, on_error="fail"), scripted(lambda request: ("ab", "stop"))
    rollout = one(play(runner, engine, requests(1)))
    sequences = [rollout, *rollout.branches]
    assert [int(sequence.extras["turns"].max()) for sequence in sequences] == [3, 1, 2]
    found = [sequence.rollout_log_probs[sequence.loss_mask].tolist() for sequence in sequences]
    expected = [engine.answer(request).rollout_log_probs[-2:].tolist() for request in engine.asked]
    assert found == [expected[2], expected[0], expected[1]]
