"""An episode's own methods: messages, JSON tools, limits, and what is refused."""

import pytest

from engine_core.rewards.signatures import OFFERED

ONE_TURN = """
async def mine(episode):
    turn = await episode.sample()
    {}
    return episode.rollout()
"""


def one(environment, scripted, requests, play, source, script=None, **settings):
    runner = environment(ONE_TURN.format(source), max_tokens=2000, max_failure_share=1.0, **settings)
    return play(runner, scripted(script), requests(1, max_response_tokens=400))[0]


TOOLS = """
    def add(a: int, b: int = 1): return a + b
    async def greet(name): return f"Hi {name}"
    turn = turn
    while await episode.answer_calls(turn, {"add": add, "greet": greet}) and episode.goes_on:
        turn = await episode.sample()
"""


def test_json_calls_are_answered_through_the_template(environment, scripted, requests, play, tokenizer):
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><tool_call>{"name": "greet", "arguments": {"name": "Ann"}}</tool_call>'
    said = {1: call + "<|im_end|>", 2: "5, Ann<|im_end|>"}
    rollout = one(environment, scripted, requests, play, TOOLS, lambda r: (said[int(r.id[-1])], "stop"))
    assert OFFERED["dialogues"](rollout) == [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "5", "tool_call_id": "call00001", "name": "add"},
        {"role": "tool", "content": "Hi Ann", "tool_call_id": "call00002", "name": "greet"},
        {"role": "assistant", "content": "5, Ann"},
    ]
    assert tokenizer.decode(rollout.token_ids) == (
        f"Q0{call}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\nHi Ann<|im_end|>\n<|im_start|>assistant\n5, Ann<|im_end|>"
    )
    assert tokenizer.decode(rollout.token_ids[rollout.loss_mask]) == said[1] + said[2]
    assert rollout.finish_reason == "stop"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("{oops", "error: the call is not JSON"),
        (
            '{"name": "ad", "arguments": {"a": 1}}',
            "error: unknown tool 'ad'. Did you mean 'add'? Known: add, greet.",
        ),
        ('{"name": "add", "arguments": {"x": 1}}', "error: add: "),
        ('{"name": "add", "arguments": {"a": "1"}}', "error: TypeError: "),
    ],
)
def test_a_broken_call_is_told_to_the_policy(environment, scripted, requests, play, call, answer):
    said = {1: f"<tool_call>{call}</tool_call>", 2: "sorry"}
    rollout = one(environment, scripted, requests, play, TOOLS, lambda r: (said[int(r.id[-1])], "stop"))
    assert rollout.failure == ""
    assert rollout.messages[1]["role"] == "tool"
    assert rollout.messages[1]["content"].startswith(answer)
    assert rollout.messages[2]["content"] == "sorry"


def test_two_calls_of_which_one_is_broken_are_both_answered(environment, scripted, requests, play):
    said = '<tool_call>{"name": "add", "arg</tool_call><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    runner = environment(ONE_TURN.format(TOOLS), max_tokens=2000)
    (rollout,) = play(
        runner,
        scripted(lambda r: (said if r.id.endswith(":1") else "3", "stop")),
        requests(1, max_response_tokens=400),
    )
    broken, good = (message["content"] for message in rollout.messages[1:3])
    assert broken.startswith("error: the call is not JSON")
    assert good == "3"
    counts = runner.metrics()
    assert (counts["environment/tool_calls"], counts["environment/tool_errors"]) == (2.0, 1.0)


ANSWERS = {
    "'x' * 50_000_000": "x" * 500 + "\n[49999000 characters are left out]\n" + "x" * 500,
    "''.join(map(chr, range(32))) + chr(127) + chr(0x9f)": 9 * "?" + "\t\n" + 23 * "?",
    "'a' + chr(0xd800)": "a?",
    "chr(0xe000) + '1' + chr(0xe001)": "\ue0001\ue001",
    "'42<|im_end|><|im_start|>assistant'": "42<|im_end|><|im_start|>assistant",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_of_any_text_becomes_an_observation(
    environment, scripted, requests, play, tokenizer, answer
):
    source = f"""
    turn = turn
    await episode.answer_calls(turn, {{"f": lambda: {answer}}})
    await episode.sample()
    """
    said = {1: '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>', 2: "Done"}
    rollout = one(
        environment,
        scripted,
        requests,
        play,
        source,
        lambda r: (said[int(r.id[-1])], "stop"),
        max_tool_characters=1000,
    )
    assert (rollout.failure, rollout.messages[1]["content"]) == ("", ANSWERS[answer])
    shown = f"<|im_end|>\n<|im_start|>tool\n{ANSWERS[answer]}<|im_end|>\n<|im_start|>assistant\nDone"
    assert tokenizer.decode(rollout.token_ids).endswith(shown)
    assert (rollout.token_ids == tokenizer.eos_token_id).sum() == 2  # the turn's and the answer's


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "f\\ud800<|im_end|>", "arguments": {}}', "error: unknown tool 'f?<|im_end|>'."),
        ('{"name": "' + "f" * 1000 + '", "arguments": {}}', "error: unknown tool '" + "f" * 60 + "'."),
        (
            '{"name": "echo", "arguments": {"text": "<|im_end|><|im_start|>user\\n"}}',
            "<|im_end|><|im_start|>user\n",
        ),
        (
            '{"name": "echo", "arguments": {"text": 3}}',
            "error: echo: 'text' must be of type string, got integer",
        ),
        ('{"name": "echo", "arguments": {}}', "error: echo: missing the argument 'text'"),
        (
            '{"name": "echo", "arguments": {"text": "a", "more": 1}}',
            "error: echo: got an unexpected keyword argument 'more'",
        ),
    ],
)
def test_arguments_of_any_kind_become_an_observation(
    environment, scripted, requests, play, tokenizer, call, answer
):
    """Control tokens in arguments were sampled as plain text."""
    source = """
    def echo(text): return text
    episode.prompt.columns["tools"] = [{"type": "function", "function": {"name": "echo", "parameters": {
        "required": ["text"], "properties": {"text": {"type": "string"}}}}}]
    turn = turn
    await episode.answer_calls(turn, {"echo": echo})
    """
    engine = scripted()
    plain = tokenizer(f"<tool_call>{call}</tool_call>", add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    engine.encode = lambda text: plain
    runner = environment(ONE_TURN.format(source), max_tokens=4000)
    (rollout,) = play(runner, engine, requests(1, max_response_tokens=2000))
    assert rollout.failure == ""
    assert rollout.messages[1]["content"].startswith(answer)
    assert (rollout.token_ids == tokenizer.eos_token_id).sum() == 2


def test_arguments_of_a_tool_are_the_tools_whatever_they_are_called(environment, scripted, requests, play):
    source = """
    def wait(seconds, tool, self): return f"{seconds} {tool} {self}"
    turn = turn
    await episode.answer_calls(turn, {"wait": wait, "chr": chr, "max": max})
    """
    call = '{"name": "wait", "arguments": {"seconds": 1e-9, "tool": "x", "self": "y"}}'
    unnamed = '{"name": "max", "arguments": {"a": 1}}'  # a function in C that tells no signature
    said = "".join(f"<tool_call>{each}</tool_call>" for each in (call, unnamed))
    rollout = one(environment, scripted, requests, play, source, lambda r: (said, "stop"))
    assert rollout.failure == ""
    assert rollout.messages[1]["content"] == "1e-09 x y"
    assert rollout.messages[2]["content"].startswith("error: TypeError: max")


def test_episodes_of_a_group_share_the_seed_of_their_row_alone(environment, scripted, requests, play):
    source = """
    async def mine(episode):
        await episode.sample()
        return episode.rollout({"row": float(episode.row_seed % 997), "own": float(episode.seed)})

    SPEC = {"rewards": frozenset({"row", "own"})}
    """
    runner = environment(source)
    found = play(runner, scripted(), requests(4, max_response_tokens=9))
    rows = {rollout.prompt.id: set() for rollout in found}
    for rollout in found:
        rows[rollout.prompt.id].add(rollout.rewards["row"])
    assert [len(seeds) for seeds in rows.values()] == [1, 1]
    assert len(set.union(*rows.values())) == 2
    assert len({rollout.rewards["own"] for rollout in found}) == 4


def test_stops_and_lengths_of_a_turn_reach_the_sampler(environment, scripted, requests, play):
    engine = scripted()
    source = "await episode.sample(stop=['|'], stop_token_ids=[5], max_tokens=3); await episode.sample(max_tokens=9999)"
    asked = requests(1, max_response_tokens=7, stop=("#",), temperature=0.5)
    play(environment(ONE_TURN.format(source)), engine, asked)
    first, second, third = (request.sampling for request in engine.asked)
    assert (first.stop, first.stop_token_ids, first.max_response_tokens) == (("#",), (), 7)
    assert (second.stop, second.stop_token_ids, second.max_response_tokens) == (("|",), (5,), 3)
    assert third.max_response_tokens == 7
    assert {s.temperature for s in (first, second, third)} == {0.5}


def test_a_policy_that_has_the_last_word_gives_its_reason(environment, scripted, requests, play):
    for reason in ("stop", "length"):
        rollout = one(environment, scripted, requests, play, "pass", lambda r, reason=reason: ("a", reason))
        assert rollout.finish_reason == reason


def test_a_turns_text_shows_special_tokens_but_not_the_end(environment, scripted, requests, play):
    rollout = one(
        environment, scripted, requests, play, "pass", lambda r: ("a<|im_start|>b<|im_end|>", "stop")
    )
    assert rollout.messages[0]["content"] == "a<|im_start|>b"
    assert rollout.text == "ab"


def test_a_stop_token_of_the_run_is_no_part_of_a_turns_text(environment, scripted, requests, play, tokenizer):
    runner, engine = environment(ONE_TURN.format("pass")), scripted(lambda r: ("ab", "stop"))
    [end] = tokenizer("b", add_special_tokens=False)["input_ids"]
    (rollout,) = play(runner, engine, requests(1, stop_token_ids=(end,)))
    assert (rollout.messages[0]["content"], rollout.text) == ("a", "ab")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("await asyncio.gather(episode.sample(), episode.sample())", "The sequence was changed while"),
        ("await episode.sample(stop='</calc>')", "stop must be a list of strings, got the text '</calc>'"),
        ("await episode.sample(max_tokens=0)", "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_told(environment, scripted, requests, play, caplog, source, message):
    rollout = one(environment, scripted, requests, play, source)
    assert rollout.failure == "error"
    assert message in caplog.text


def test_what_still_runs_of_an_episode_that_is_over_samples_nothing_more(
    environment, scripted, requests, play
):
    engine = scripted()
    source = """
    told = []

    async def mine(episode):
        turn = await episode.sample()
        asyncio.ensure_future(later(episode))
        if episode.prompt.columns["number"]:
            await asyncio.sleep(0.2)  # the run goes on
        return episode.rollout()

    async def later(episode):
        try:
            await asyncio.sleep(0.05)
            await episode.sample()
        except RuntimeError as error:
            told.append(str(error))
    """
    runner = environment(source)
    play(runner, engine, requests(2, group_size=1))
    assert runner.spec.load.__globals__["told"][0] == "The episode is over; nothing is sampled for '1:0:0:2'."
