"""The policy endpoint: harnesses that talk to it with the OpenAI client, and what of their episodes is learned."""

import textwrap
import zlib

import pytest
from chat_templates import tokenizer_of

from engine_plugin_agents import conversations

TWO_TURNS = """
def solve(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]
    for number in range(2):
        answer = client.chat.completions.create(model="any", messages=messages, temperature=0.3)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"Why {number}?"}]
    return {"good": float(row["number"])}
"""


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
    assert (metrics["environment/turns"], metrics["environment/branches"]) == (5, 4)
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
    metrics = runner.metrics()
    assert (metrics["environment/turns"], metrics["environment/branches"]) == (6, 24)


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
    assert (rollout.messages[1]["name"], rollout.messages[1]["content"]) == ("add", "5")
    assert all(message["seconds"] >= 0 for message in rollout.messages)
    metrics = runner.metrics()
    assert metrics["environment/tool_calls"] == metrics["environment/branches"] == 1
    assert metrics["environment/reencoded_tokens"] == 0


def test_calls_before_a_stop_string_count_and_the_text_before_them_is_whole(
    harness, scripted, requests, play
):
    source = """
    def solve(row, base_url, api_key):
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        client = OpenAI(base_url=base_url, api_key=api_key)
        asked = {"model": "", "messages": [{"role": "user", "content": "Add"}], "tools": tools, "stop": ["END"]}
        choice = client.chat.completions.create(**asked).choices[0]
        [call] = choice.message.tool_calls
        return {"good": float((choice.message.content, call.function.name) == ('Ann is {"name": "Ann"}:', "add"))}
    """
    text = 'Ann is {"name": "Ann"}: <tool_call>{"name":"add","arguments":{}}</tool_call>END'
    late = '<tool_call>{"name":"late","arguments":{}}</tool_call>'
    engine = scripted(lambda request: (text + late, "stop"))
    runner = harness(textwrap.dedent(source))
    assert one(play(runner, engine, requests(1, max_response_tokens=200))).rewards["good"] == 1.0


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


@pytest.mark.slow
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


def test_recent_conversations_forget_the_oldest_and_obey_sampling_parameters(
    environment, scripted, requests, play, monkeypatch
):
    source = """
    from engine_plugin_agents.conversations import Question, RecentConversations

    async def mine(episode):
        recent = RecentConversations(episode)
        user, tools = {"role": "user", "content": "Hi"}, [{"type": "function", "function": {"name": "f"}}]
        first = (await recent.answer(Question([user], tools, drawn={"temperature": 0.25}))).message()
        questions = [Question([user, first, {**user, "content": text}], tools) for text in "abc"]
        for question in questions[:2]:
            await recent.answer(question)
        assert len(recent._branches) == len(recent._calls) == 2
        assert recent._find(questions[2])[2] == 0  # the first turn is forgotten
        for messages in ([user], [user, {"role": "assistant", "content": "I said"}, user]):
            await recent.answer(Question(messages))
        assert episode.counts["reencoded_tokens"] == 0
        keys = [*recent._branches]
        await recent.answer(Question([user]))
        assert [*recent._branches] == keys[::-1]  # a repeated turn is the newest
        return episode.rollout()
    """
    monkeypatch.setattr(conversations, "KEPT", 2)
    engine = scripted(lambda request: ('Hm <tool_call>{"name":"f","arguments":{}}</tool_call>', "stop"))
    runner = environment(textwrap.dedent(source), on_error="fail", max_tokens=1000)
    play(runner, engine, requests(1, max_response_tokens=60, temperature=0.7))
    assert [request.sampling.temperature for request in engine.asked] == [0.25] + [0.7] * 5
    said = engine.answer(engine.asked[0]).token_ids.tolist()
    assert all(request.prompt.token_ids[: len(said)] == said for request in engine.asked[1:3])


def test_a_client_of_gpt_oss_reads_the_final_channel_and_continues_it(harness, scripted, requests, play):
    source = """
    for number in range(2):
        answer = client.chat.completions.create(model="", messages=messages).choices[0].message
        assert answer.content == "42", answer
        messages += [answer, {"role": "user", "content": "Again."}]
"""
    final = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    engine = scripted(lambda request: (final, "stop"))
    engine.tokenizer = tokenizer_of("gpt_oss")
    runner = harness(ASK % source.strip(), own=engine.tokenizer, on_error="fail")
    play(runner, engine, requests(1, max_response_tokens=200))
    metrics = runner.metrics()
    assert (metrics["environment/branches"], metrics["environment/reencoded_tokens"]) == (1, 0)
