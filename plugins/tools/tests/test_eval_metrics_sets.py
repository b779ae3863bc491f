"""What is told of one set, against values worked out by hand."""

import pytest
import torch

from engine_core.config.evaluation import HeldOut
from engine_core.types import Prompt, Rollout
from engine_plugin_tools.eval_metrics import set_metrics

ASKED = HeldOut(
    name="", path="held.jsonl", max_prompts=None, temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=8,
    samples_per_prompt=4, k=[1, 2, 4], majority="math", score=None, pass_threshold=1.0,
)  # fmt: skip


def rollouts(scores, answers=None):
    """One rollout for each score of each prompt, its text the answer."""
    made = []
    for group, row in enumerate(scores):
        for index, score in enumerate(row):
            answer = answers[group][index] if answers else None
            rollout = Rollout(
                f"{group}:{index}", Prompt(f"validation:{group}", [3], "?"), torch.tensor([3, 4]),
                torch.tensor([False, True]), torch.zeros(2), torch.zeros(2, dtype=torch.int32), "stop",
            )  # fmt: skip
            rollout.group_id, rollout.index, rollout.text = group, index, f" {answer} \n"
            rollout.reward, rollout.rewards = 2 * (score or 0.0), {"math": score}
            rollout.answers = {} if answer is None else {"math": answer}
            made.append(rollout)
    return made


ROWS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 4]
SAID = [["4", "5", "6", None], ["8", "8", "7", "8"], ["1", "1", "2", "2"]]


def test_passes_votes_and_means_are_over_prompts():
    found = set_metrics(rollouts(ROWS, SAID), ASKED)
    assert found["accuracy"] == found["math"] == found["mean@4"] == pytest.approx(4 / 12)
    assert found["pass@1"] == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)
    assert found["pass@2"] == pytest.approx((1 / 2 + 1 + 0) / 3)  # of 6 pairs 3, 6 and 0 hold a pass
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert found["maj@4"] == pytest.approx((1 / 3 + 1 + 0) / 3)  # three answers with one vote each share it
    assert found["reward_mean"] == pytest.approx(2 * 4 / 12)
    assert (found["prompts"], found["unscored"], found["response_length"]) == (3, 0, 1)
    assert found["accuracy_low"] == found["pass@1_low"]  # scores that are 0 or 1 are passes
    for name in ("accuracy", "mean@4", "pass@1", "pass@4", "maj@4", "reward_mean"):
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]


def test_text_votes_on_whole_responses():
    found = set_metrics(
        rollouts([[1.0, 1.0, 0.0]], [["4", "4", "5"]]),
        ASKED.model_copy(update={"k": [3], "majority": "text"}),
    )
    assert found["maj@3"] == 1.0


def test_a_response_without_a_score_is_left_out_and_counted():
    found = set_metrics(rollouts([[1.0, None, None, None], [0.0, 0.0, 0.0, 0.0]]), ASKED)
    assert found["unscored"] == 3
    assert found["accuracy"] == 0.5
    assert found["pass@1"] == 0.5
    assert found["pass@2"] == 0.0  # of the second prompt: the first has one scored response


def test_the_threshold_says_what_passes():
    graded = rollouts([[0.5, 0.4, 0.9, 0.0]])
    assert set_metrics(graded, ASKED)["pass@4"] == 0.0
    found = set_metrics(graded, ASKED.model_copy(update={"pass_threshold": 0.5}))
    assert (found["pass@1"], found["pass@4"]) == (0.5, 1.0)
    assert found["accuracy"] == pytest.approx(0.45)  # of the scores themselves
    assert "accuracy_low" not in found  # one prompt


def test_the_score_is_the_reward_that_is_named():
    rows = rollouts([[1.0, 0.0]])
    for rollout in rows:
        rollout.rewards["format"] = 1.0
    found = set_metrics(rows, ASKED.model_copy(update={"k": [1], "score": "format", "samples_per_prompt": 2}))
    assert (found["accuracy"], found["math"], found["pass@1"]) == (1.0, 0.5, 1.0)


def test_one_response_to_one_prompt_says_next_to_nothing():
    found = set_metrics(
        rollouts([[1.0]]), ASKED.model_copy(update={"k": [], "samples_per_prompt": 1, "majority": "off"})
    )
    assert found == {
        "math": 1.0, "accuracy": 1.0, "accuracy_low": pytest.approx(0.025), "accuracy_high": 1.0, "reward_mean": 2.0, "response_length": 1.0, "truncated_share": 0.0, "prompts": 1.0, "unscored": 0.0,
    }  # fmt: skip


def test_where_nothing_is_scored_there_is_no_pass():
    found = set_metrics(rollouts([[None, None]]), ASKED)
    assert (found["accuracy"], found["unscored"]) == (0.0, 2)
    assert not any(name.startswith(("pass", "maj")) for name in found)
