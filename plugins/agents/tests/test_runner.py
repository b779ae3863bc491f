"""Episodes of a step: what comes of them, whatever the order in which samples and tools end, and whatever fails."""

import random
import time

import pytest
import torch

from engine_core.rewards.signatures import OFFERED
from engine_plugin_agents.policy import turn_seed

THREE_TURNS = """
SPEC = {"rewards": frozenset({"long"})}

async def mine(episode):
    for number in range(3):
        turn = await episode.sample(max_tokens=5)
        answer = await episode.call(slow, turn.text)
        episode.append(f"[{answer}]")
    return episode.rollout({"long": float(len(turn.text))})

def slow(text):
    time.sleep(0.001 * (len(text) % 4))
    return text.upper()
"""


def values(rollouts):
    return [
        (
            r.request_id,
            r.token_ids.tolist(),
            r.loss_mask.tolist(),
            r.rollout_log_probs.tolist(),
            r.rewards,
            OFFERED["dialogues"](r),
            r.finish_reason,
        )
        for r in rollouts
    ]


def test_only_what_the_policy_said_is_learned_and_stands_as_it_was_sampled(
    environment, scripted, requests, play, tokenizer
):
    engine = scripted()
    engine.version = 7
    rollouts = play(environment(THREE_TURNS), engine, requests(4))
    by_id = {request.id: request for request in engine.asked}
    for rollout in rollouts:
        expected, mask, log_probs, turns = list(rollout.prompt.token_ids), [], [], []
        mask, log_probs = [False] * len(expected), [0.0] * len(expected)
        turns = [0] * len(expected)
        for number in (1, 2, 3):
            request = by_id[f"{rollout.request_id}:{number}"]
            assert request.prompt.token_ids == expected  # tokens in
            answer = engine.answer(request)
            said = answer.token_ids[len(expected) :].tolist()
            text = f"[{tokenizer.decode(said).upper()}]"
            told = tokenizer(text, add_special_tokens=False)["input_ids"]
            log_probs += answer.rollout_log_probs[len(expected) :].tolist() + [0.0] * len(told)
            expected += said + told
            mask += [True] * len(said) + [False] * len(told)
            turns += [number] * (len(said) + len(told))
        assert rollout.token_ids.tolist() == expected
        assert rollout.loss_mask.tolist() == mask
        assert rollout.rollout_log_probs.tolist() == log_probs
        assert rollout.policy_versions.tolist() == [7 * m for m in mask]
        assert rollout.extras["turns"].tolist() == turns
        assert [m["role"] for m in rollout.messages] == ["assistant", "tool"] * 3
        assert rollout.finish_reason == "length"  # a tool had the last word


def test_rollouts_come_in_the_order_of_the_requests_with_their_names(environment, scripted, requests, play):
    asked = requests(6, group_size=3)
    rollouts = play(environment(THREE_TURNS), scripted(order=3, per_step=1), asked)
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    assert [(r.group_id, r.index) for r in rollouts] == [(r.group_id, r.index) for r in asked]
    assert all(r.prompt is request.prompt for r, request in zip(rollouts, asked, strict=True))


def test_the_order_in_which_samples_end_changes_no_rollout(environment, scripted, requests, play):
    runner = environment(THREE_TURNS)
    expected = values(play(runner, scripted(), requests(12)))
    for order in range(4):
        engine = scripted(order=order, per_step=1 + order)
        assert values(play(runner, engine, requests(12))) == expected
    assert values(play(environment(THREE_TURNS, max_concurrent=2), scripted(), requests(12))) == expected


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_the_request(
    environment, scripted, requests, play
):
    engine, asked = scripted(), requests(4)
    play(environment(THREE_TURNS), engine, asked)
    own = {request.id: request.sampling.seed for request in asked}
    seeds = {r.id: r.sampling.seed for r in engine.asked}
    assert len(set(seeds.values())) == 12
    for name, seed in seeds.items():
        episode, _, number = name.rpartition(":")
        assert seed == turn_seed(own[episode], int(number))
        assert number != "1" or seed == own[episode]


def test_samples_that_are_asked_for_together_are_sampled_together(environment, scripted, requests, play):
    engine = scripted()
    play(environment(THREE_TURNS), engine, requests(16, group_size=4))
    assert engine.most == 16


def test_a_slow_tool_holds_up_no_other_episode(environment, scripted, requests, play):
    source = """
    others = threading.Event()

    async def mine(episode):
        await episode.sample()
        if episode.prompt.columns["number"] == 0:
            episode.append(await episode.call(others.wait, 60))  # until the others are over
        else:
            for _ in range(3):
                await episode.sample()
            others.set()
        return episode.rollout()
    """
    runner = environment(source, tool_timeout_seconds=60)
    rollouts = play(runner, scripted(), requests(3, group_size=1))
    assert rollouts[0].messages[1]["content"] == "True"


def test_no_more_episodes_run_at_once_than_allowed(environment, scripted, requests, play):
    engine = scripted()
    rollouts = play(environment(THREE_TURNS, max_concurrent=3), engine, requests(8))
    assert len(rollouts) == 8
    assert engine.most <= 3


def test_extras_of_the_sampler_cover_what_was_sampled(environment, scripted, requests, play):
    class WithMass(type(scripted())):
        def answer(self, request):
            made = super().answer(request)
            made.extras["support_log_mass"] = torch.where(made.loss_mask, -0.5, 0.0)
            made.extras["experts"] = made.token_ids[:, None].repeat(1, 2)
            return made

    (rollout,) = play(environment(THREE_TURNS), WithMass(scripted().tokenizer), requests(1))
    assert rollout.extras["support_log_mass"].tolist() == [-0.5 * m for m in rollout.loss_mask.tolist()]
    assert rollout.extras["experts"].shape == (len(rollout.token_ids), 2)
    experts = rollout.extras["experts"][rollout.loss_mask]
    assert (experts == rollout.token_ids[rollout.loss_mask][:, None]).all()


def test_a_class_is_made_once_with_its_options_and_closed_on_the_loop(environment, scripted, requests, play):
    source = """
    class MineOptions(Options):
        word: str = "x"

    class mine:
        made, closed = [], []

        def __init__(self, word):
            self.word = word
            self.made.append(word)

        async def __call__(self, episode):
            self.thread = threading.current_thread()
            await episode.sample()
            episode.append(self.word)
            return episode.rollout()

        async def close(self):
            self.closed.append(threading.current_thread() is self.thread)

    SPEC = {"config": MineOptions}
    """
    runner = environment(source, options={"word": "magic"})
    kind = type(runner.play)
    for _ in range(2):
        rollouts = play(runner, scripted(), requests(3))
        assert {r.messages[1]["content"] for r in rollouts} == {"magic"}
    runner.close()
    runner.close()
    assert (kind.made, kind.closed) == (["magic"], [True])


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_environment_that_fails_to_close_is_told_and_no_thread_is_left(
    environment, scripted, requests, play, caplog, kind
):
    source = f"""
    class mine:
        async def __call__(self, episode):
            await episode.sample()
            return episode.rollout()

        {kind} close(self):
            raise OSError("the pipe is gone")
    """
    runner = environment(source)
    play(runner, scripted(), requests(1))
    thread = runner.loop._thread
    runner.close()
    assert not thread.is_alive()
    assert "environment 'mine' failed to close: OSError: the pipe is gone" in caplog.text


def test_an_episodes_own_draws_follow_its_seed(environment, scripted, requests, play):
    source = """
    import random

    async def mine(episode):
        await episode.sample()
        episode.append(str(random.Random(episode.seed).random()))
        return episode.rollout()
    """
    runner = environment(source)
    expected = [str(random.Random(1000 + i).random()) for i in range(4)]
    for sampler in (scripted(), scripted(order=5, per_step=1)):
        assert [r.messages[1]["content"] for r in play(runner, sampler, requests(4))] == expected


def test_messages_and_metrics_say_what_took_how_long(environment, scripted, requests, play):
    source = """
    async def slow(): await asyncio.sleep(0.05); return "4"
    def broken(): raise ValueError("no")

    async def mine(episode):
        await episode.sample()
        episode.append(await episode.call(slow) + await episode.call(broken))
        await episode.sample()
        episode.append("end", role="user")
        return episode.rollout()
    """

    def script(request):
        time.sleep(0.02)
        return "ab", "stop"

    runner = environment(source, max_concurrent=1)
    first, second = play(runner, scripted(script), requests(2))
    for rollout in (first, second):
        one, tools, two, end = rollout.messages
        assert one["seconds"] >= 0.02 <= two["seconds"]
        assert tools["seconds"] >= 0.05
        assert [(call["name"], call.get("failure")) for call in tools["calls"]] == [
            ("slow", None), ("broken", "error"),
        ]  # fmt: skip
        assert tools["calls"][0]["seconds"] >= 0.05
        assert end.keys() == {"role", "content", "seconds"}
        assert OFFERED["dialogues"](rollout)[1] == {"role": "tool", "content": "4error: ValueError: no"}
    metrics = runner.metrics()
    assert metrics["time/episode_sampling"] >= 0.04
    assert metrics["time/episode_tool"] >= 0.05
    assert metrics["time/episode_waiting"] >= 0.09 / 2  # one of two episodes waited for the other
    assert metrics["environment/tool_failure_share"] == 0.5
    assert "time/episode_waiting" not in runner.metrics()
