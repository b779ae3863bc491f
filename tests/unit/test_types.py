from types import SimpleNamespace

import pytest
import torch

from engine_core.types import Batch, Prompt, Request, Rollout, Sampling, sequences_of


def rollout(prompt, response, reward=0.0, **changes):
    n, m = len(prompt), len(response)
    values = {
        "request_id": "r",
        "prompt": Prompt("train:0", prompt, "text"),
        "token_ids": torch.tensor(prompt + response),
        "loss_mask": torch.tensor([False] * n + [True] * m),
        "rollout_log_probs": torch.tensor([0.0] * n + [-0.5] * m),
        "policy_versions": torch.zeros(n + m, dtype=torch.int32),
        "finish_reason": "stop",
        "reward": reward,
        **changes,
    }
    return Rollout(**values)


def two():
    return Batch.from_rollouts(
        [rollout([5, 9], [7], 1.0, group_id=3), rollout([5], [1], 0.5, finish_reason="length")], 0.7
    )


def test_a_request_alone_is_the_first_of_its_group():
    request = Request("r", Prompt("train:0", [5], "text"), Sampling())
    assert (request.group_id, request.index, request.begun) == (0, 0, None)


def test_rollouts_are_packed_one_after_another():
    batch = two()
    assert batch.token_ids.tolist() == [5, 9, 7, 5, 1]
    assert batch.lengths.tolist() == [3, 2]
    assert batch["loss_mask"].tolist() == [False, False, True, False, True]
    assert batch["rewards"].tolist() == [1.0, 0.5]
    assert batch["group_ids"].tolist() == [3, 0]
    assert batch["response_lengths"].tolist() == [1, 1]
    assert batch["truncated"].tolist() == [False, True]
    assert batch.temperature == 0.7


def test_an_invalid_rollout_has_no_loss_tokens():
    batch = Batch.from_rollouts([rollout([5], [1, 2], valid=False), rollout([5], [1])])
    assert batch["loss_mask"].tolist() == [False, False, False, False, True]


def test_log_probs_of_a_cut_support_are_brought_back_to_the_whole_vocabulary():
    extras = {"support_log_mass": torch.tensor([0.0, -0.2])}
    batch = Batch.from_rollouts([rollout([5], [1], extras=extras)])
    assert batch["rollout_log_probs"].tolist() == pytest.approx([0.0, -0.7])


def test_a_reward_that_does_not_apply_is_nan_in_its_column():
    rollouts = [rollout([5], [1], rewards={"a": 1.0}), rollout([5], [1], rewards={"a": None})]
    assert Batch.from_rollouts(rollouts)["reward/a"].tolist() == [
        1.0,
        pytest.approx(float("nan"), nan_ok=True),
    ]


def test_select_takes_sequences_with_all_their_columns_in_the_order_asked():
    chosen = two().select([1, 0])
    assert chosen.token_ids.tolist() == [5, 1, 5, 9, 7]
    assert chosen["rewards"].tolist() == [0.5, 1.0]
    assert chosen["loss_mask"].tolist() == [False, True, False, False, True]


def test_split_cuts_all_columns_between_sequences():
    one, none, other = two().split([1, 0, 1])
    assert one.token_ids.tolist() == [5, 9, 7]
    assert other.token_ids.tolist() == [5, 1]
    assert [part["rewards"].tolist() for part in (one, none, other)] == [[1.0], [], [0.5]]
    assert other["loss_mask"].tolist() == [False, True]
    assert none.num_tokens == 0


def test_sequence_and_token_values_convert_into_each_other():
    batch = two()
    assert batch.sum_by_sequence(torch.tensor([1.0, 2, 3, 4, 5])).tolist() == [6.0, 9.0]
    for values in (torch.tensor([10.0, 20.0]), torch.tensor([10, 20])):
        assert batch.to_tokens(values).tolist() == [10, 10, 10, 20, 20]
        assert batch.to_tokens(values).dtype == values.dtype
    assert batch.offsets.tolist() == [0, 3, 5]


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(KeyError, match=r"no column 'values'. It has: .*rewards"):
        two()["values"]


def test_no_rollouts_are_an_empty_batch():
    batch = Batch.from_rollouts([])
    assert len(batch) == batch.num_tokens == 0
    assert batch.select([]).num_tokens == 0


def test_a_rollout_without_a_cut_support_beside_one_with_it_has_lost_nothing():
    extras = {"support_log_mass": torch.tensor([0.0, -0.2])}
    batch = Batch.from_rollouts([rollout([5], [1], extras=extras), rollout([5], [1])])
    assert batch["rollout_log_probs"].tolist() == pytest.approx([0.0, -0.7, 0.0, -0.5])


def test_a_replayed_support_is_padded_and_its_log_probs_are_as_sampled():
    mass = {"support_log_mass": torch.tensor([0.0, -0.2])}
    told = mass | {"support_ids": torch.tensor([[-1, -1], [1, 7]], dtype=torch.int32)}
    wide = mass | {"support_ids": torch.tensor([[-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)}
    rollouts = [rollout([5], [1], extras=told), rollout([5], [1], extras=wide), rollout([5], [1])]
    batch = Batch.from_rollouts(rollouts, replay=True)
    assert batch["support_ids"].tolist() == [[-1] * 3, [1, 7, -1]] + [[-1] * 3] * 4
    assert batch["support_ids"].dtype == torch.int32
    assert batch["rollout_log_probs"].tolist() == pytest.approx([0.0, -0.5, 0.0, -0.7, 0.0, -0.5])
    plain = Batch.from_rollouts(rollouts)
    assert "support_ids" not in plain
    assert plain["rollout_log_probs"].tolist() == pytest.approx([0.0, -0.7, 0.0, -0.7, 0.0, -0.5])


def test_each_sampling_option_comes_from_the_last_table_that_has_it():
    told = Sampling(0.5, 0.9, 7, 11, ("a",), (3,), 1, 5, False, 2.0)
    own = SimpleNamespace(temperature=0.0, max_response_tokens=None, seed=9)
    found = Sampling.of(told, own, log_probs=False)
    assert found == Sampling(0.0, 0.9, 7, 11, ("a",), (3,), log_probs=False)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize("learned", [False, True])
def test_each_token_gets_the_value_of_its_sequence_bit_for_bit(dtype, learned):
    values = torch.tensor([0.1, -0.0, 3.0]).to(dtype)
    values.requires_grad_(learned and dtype.is_floating_point)
    batch = Batch(torch.arange(5), torch.tensor([2, 0, 3]))
    found = batch.to_tokens(values)
    assert found.dtype is dtype
    assert found.requires_grad == values.requires_grad
    assert torch.equal(found, values[torch.tensor([0, 0, 2, 2, 2])])


def test_branches_follow_their_rollout_and_share_its_verdict():
    branches = [rollout([5], [8]), rollout([6], [8, 8])]
    whole = rollout([5], [7], 2.0, rewards={"a": 2.0}, group_id=3, valid=False, branches=branches)
    found = sequences_of([whole, rollout([5], [7])])
    assert found[0] is whole
    assert [len(r.token_ids) for r in found] == [2, 2, 3, 2]
    assert [r.request_id.partition("/")[2] for r in found] == ["", "1", "2", ""]
    assert [(r.reward, r.rewards, r.group_id, r.valid) for r in found[:3]] == [
        (2.0, {"a": 2.0}, 3, False)
    ] * 3
    assert branches[0].reward == 0.0  # unchanged
