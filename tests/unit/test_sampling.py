import dataclasses

import pytest
import torch

from engine_core.contracts.engines import RolloutEngine
from engine_core.errors import PluginError
from engine_core.types import Prompt, Request, Rollout, Sampling


class Echo(RolloutEngine):
    """Answers each prompt with its first token, two requests a step, last ones first."""

    def __init__(self, spoil=lambda rollouts: rollouts):
        super().__init__(None, None, None)
        self.queue, self.spoil = [], spoil

    def add(self, requests):
        self.queue += requests

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        taken, self.queue = self.queue[-2:], self.queue[:-2]
        return self.spoil([self.answer(request) for request in reversed(taken)])

    def answer(self, request):
        tokens = request.prompt.token_ids
        n = len(tokens)
        return Rollout(
            request.id,
            request.prompt,
            torch.tensor([*tokens, tokens[0]]),
            torch.tensor([False] * n + [True]),
            torch.tensor([0.0] * n + [-1.0]),
            torch.zeros(n + 1, dtype=torch.int32),
            "stop",
            request.group_id,
            request.index,
        )

    def abort(self, ids):
        return []

    def update_weights(self, stream, version):
        return ""


def requests(count):
    return [Request(f"r{i}", Prompt(f"train:{i}", [i + 3, 4], ""), Sampling()) for i in range(count)]


def test_rollouts_come_in_the_order_of_the_requests():
    asked = requests(5)
    assert [r.request_id for r in Echo().generate(asked)] == [r.id for r in asked]


def test_a_rollout_that_is_refused_leaves_no_deadline():
    engine = Echo(spoil=lambda rollouts: [*rollouts, *rollouts])
    asked = [dataclasses.replace(r, sampling=Sampling(timeout_s=60.0)) for r in requests(2)]
    with pytest.raises(PluginError, match="done already"):
        engine.generate(asked)
    assert engine.deadlines._ends == {}


def spoiled(change):
    return lambda rollouts: [change(r) for r in rollouts]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rs: [*rs, *rs], "a rollout for 'r2', which was not requested or is done already"),
        (lambda rs: [], "stopped with 3 requests unfinished, such as 'r0'"),
        (
            spoiled(lambda r: dataclasses.replace(r, request_id="x")),
            "a rollout for 'x', which was not requested",
        ),
        (spoiled(lambda r: dataclasses.replace(r, loss_mask=r.loss_mask[1:])), "2 loss_mask for 3 tokens"),
        (
            spoiled(lambda r: dataclasses.replace(r, token_ids=r.token_ids + 1)),
            "another prompt than was asked",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, rollout_log_probs=r.rollout_log_probs * float("inf"))),
            "a log-prob that is not finite",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, policy_versions=r.policy_versions + 1)),
            "a policy version below 0 or above its own 0",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, policy_versions=r.policy_versions - 1)),
            "a policy version below 0 or above its own 0",
        ),
        (spoiled(lambda r: dataclasses.replace(r, group_id=7)), "the group or the index of another request"),
        (spoiled(lambda r: dataclasses.replace(r, text=None)), "a text of type NoneType, expected str"),
        (
            spoiled(lambda r: dataclasses.replace(r, token_ids=r.token_ids - 10**6 * r.loss_mask)),
            "a token id below 0",
        ),
        (spoiled(lambda r: dataclasses.replace(r, index=7)), "the group or the index of another request"),
        (
            spoiled(lambda r: dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, id="train:9"))),
            "the prompt, the group or the index of another request",
        ),
        (spoiled(lambda r: dataclasses.replace(r, loss_mask=~r.loss_mask)), "not that of its response"),
        (
            spoiled(lambda r: dataclasses.replace(r, loss_mask=r.loss_mask & False)),
            "not that of its response",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, rollout_log_probs=-r.rollout_log_probs)),
            "a log-prob above 0",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, token_ids=r.token_ids.float())),
            "token_ids as torch.float32, expected a tensor of int64",
        ),
        (
            spoiled(lambda r: dataclasses.replace(r, token_ids=r.token_ids.tolist())),
            "token_ids as list, expected",
        ),
        (spoiled(lambda r: dataclasses.replace(r, loss_mask=r.loss_mask.int())), "loss_mask as torch.int32"),
        (lambda rs: None, "returned NoneType from step"),
        (lambda rs: [{"text": "4"}], "returned {'dict'} from step"),
    ],
)
def test_what_an_engine_returns_is_checked_and_the_engine_named(spoil, message):
    with pytest.raises(PluginError, match=message) as caught:
        Echo(spoil).generate(requests(3))
    assert "Echo" in str(caught.value)


def test_a_rollout_has_the_prompt_of_its_request_whatever_the_engine_gave():
    other = spoiled(
        lambda r: dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, columns={"answer": 9}))
    )
    asked = requests(2)
    assert all(r.prompt is a.prompt for r, a in zip(Echo(other).generate(asked), asked, strict=True))


def test_requests_need_distinct_ids():
    with pytest.raises(ValueError, match="distinct ids"):
        Echo().generate(requests(1) * 2)


def test_after_a_failure_nothing_is_left_in_the_queue():
    aborted = []
    engine = Echo(spoiled(lambda r: dataclasses.replace(r, request_id="x")))
    engine.abort = lambda ids: aborted.extend(ids) or []
    with pytest.raises(PluginError):
        engine.generate(requests(3))
    assert aborted == ["r0", "r1", "r2"]


def test_advance_takes_requests_as_they_come_and_gives_rollouts_as_they_end():
    engine, asked = Echo(), requests(5)
    assert [r.request_id for r in engine.advance(asked[:3])] == ["r2", "r1"]
    assert [r.request_id for r in engine.advance(asked[3:])] == ["r4", "r3"]
    assert [r.request_id for r in engine.advance()] == ["r0"]
    assert engine.advance() == []
    assert engine.running == {}


def test_several_rounds_of_advance_give_what_as_many_calls_would_and_end_with_the_last_request():
    engine, asked = Echo(), requests(7)
    assert [r.request_id for r in engine.advance(asked, rounds=2)] == ["r6", "r5", "r4", "r3"]
    steps = []
    engine.step, step = lambda: steps.append(1) or step(), engine.step
    assert [r.request_id for r in engine.advance(rounds=5)] == ["r2", "r1", "r0"]
    assert len(steps) == 2  # none once nothing is left
    assert engine.advance(rounds=3) == []


def test_an_engine_that_stops_in_a_later_round_is_named():
    engine = Echo()
    engine.add = lambda asked: engine.queue.extend(asked[:2])  # and forgets the others
    with pytest.raises(PluginError, match="stopped with 2 requests unfinished, such as 'r2'"):
        engine.advance(requests(4), rounds=2)


def test_advance_forgets_what_is_dropped_even_if_it_was_done():
    engine, asked = Echo(), requests(4)
    engine.advance(asked)  # r3 and r2 are done, r0 and r1 wait
    engine.abort = lambda ids: []  # the engine had them done already
    assert [r.request_id for r in engine.advance(dropped=["r1", "r3"])] == ["r0"]
    assert engine.advance() == []
    assert engine.dropped == set()


def test_an_id_can_be_used_again_after_its_request_was_dropped():
    engine, asked = Echo(), requests(6)
    engine.abort = lambda ids: [engine.answer(engine.queue.pop(0)) for id in ids]
    engine.advance(asked)  # r5 and r4 are done, four wait
    assert [r.request_id for r in engine.advance([asked[5]], dropped=["r0"])] == ["r5", "r3"]
    assert engine.dropped == set()
    assert sorted(r.request_id for r in engine.advance([asked[0]], rounds=5)) == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rs: [*rs, *rs], "a rollout for 'r1', which was not requested"),
        (lambda rs: [], "stopped with 2 requests unfinished, such as 'r0'"),
        (spoiled(lambda r: dataclasses.replace(r, loss_mask=r.loss_mask[1:])), "2 loss_mask for 3 tokens"),
    ],
)
def test_advance_checks_what_an_engine_returns(spoil, message):
    engine = Echo(spoil)
    with pytest.raises(PluginError, match=message):
        engine.advance(requests(2)), engine.advance()
