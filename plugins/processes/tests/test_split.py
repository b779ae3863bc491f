"""What is split over slices comes back as if it had not been."""

import dataclasses
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import PluginError
from engine_core.packing import plan_micro_batches
from engine_core.types import Batch, Prompt, Request, Rollout, Sampling, TrainOutput
from engine_plugin_processes.codec import decode, encode
from engine_plugin_processes.split import (
    Running,
    merge_futures,
    merge_plain,
    split_batch,
    split_requests,
)


def read(share):
    """What the rank reads that it is sent to."""
    encoded = encode(share)
    return decode(encoded.header, bytearray(b"".join(encoded.buffers)))


def shares_of(lengths, slices, attention):
    batch = batch_of(lengths)
    shares, _ = split_batch(batch, slices, attention)
    return shares if slices == 1 else [read(share) for share in shares]


def batch_of(lengths, keep_together=None):
    total = sum(lengths)
    return Batch(
        torch.arange(total),
        torch.tensor(lengths, dtype=torch.int64),
        tokens={"x": torch.arange(total) * 2.0},
        sequences={"r": torch.arange(len(lengths)) * 3.0},
        keep_together=None if keep_together is None else torch.tensor(keep_together),
    )


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
def test_values_per_token_and_per_sequence_come_back_in_order(lengths, slices):
    lengths = [*lengths, 3]  # with sequences of more than a token the two are told apart
    batch = batch_of(lengths)
    shares, merge = split_batch(batch, slices, attention=0.01)
    assert len(shares) == slices
    shares = [read(share) for share in shares]
    outputs = [
        {
            "tokens": share.token_ids.float(),
            "top": torch.stack([share.token_ids, share.token_ids], dim=-1),
            "sequences": share["r"],
        }
        for share in shares
    ]
    found = merge(outputs)
    assert torch.equal(found["tokens"], batch.token_ids.float())
    assert torch.equal(found["top"], torch.stack([batch.token_ids] * 2, dim=-1))
    assert torch.equal(found["sequences"], batch["r"])


@given(
    st.lists(st.integers(1, 9), max_size=12),
    st.integers(2, 5),
    st.sampled_from(["bfloat16", "float32", "bool"]),
)
def test_a_rank_reads_the_whole_of_its_sequences(lengths, slices, dtype):
    batch, total = batch_of(lengths), sum(lengths)
    batch.tokens["wide"] = (
        torch.arange(3 * total).reshape(3, total).t().to(getattr(torch, dtype))
    )  # in strides
    shares, _ = split_batch(batch, slices, attention=0.01)
    seen = 0
    for share in map(read, shares):
        rows = [int(value) // 3 for value in share["r"]]
        wanted = batch.select(rows)
        seen += len(rows)
        assert torch.equal(share.token_ids, wanted.token_ids)
        assert torch.equal(share.lengths, wanted.lengths)
        assert share["wide"].dtype == batch["wide"].dtype
        assert torch.equal(share["wide"], wanted["wide"])
        assert torch.equal(share["x"], wanted["x"])
    assert seen == len(lengths)


def test_one_slice_gets_the_batch_as_it_is():
    batch = batch_of([3, 1, 2])
    shares, merge = split_batch(batch, 1, 0.0)
    assert shares[0] is batch
    assert merge(["result"]) == "result"


def test_pairs_stay_together_and_the_work_is_even():
    lengths, pairs = [9, 1, 5, 5, 4, 6], [0, 0, 1, 1, 2, 2]
    shares, _ = split_batch(batch_of(lengths, pairs), 3, 0.0)
    shares = [read(share) for share in shares]
    assert [sorted(share.keep_together.tolist()) for share in shares] == [[0, 0], [1, 1], [2, 2]]
    assert [share.num_tokens for share in shares] == [10, 10, 10]


def test_what_engines_have_summed_over_ranks_is_taken_once():
    _, merge = split_batch(batch_of([1, 2]), 2, 0.0)
    output = TrainOutput(0.5, {"a": 1.0}, 1)
    assert merge([output, output]) is output


def test_values_of_another_number_are_the_plugins_fault():
    _, merge = split_batch(batch_of([4, 4]), 2, 0.0)
    with pytest.raises(PluginError, match=r"gave \[3, 4\] values of 'log_probs'"):
        merge([{"log_probs": torch.zeros(3)}, {"log_probs": torch.zeros(4)}])


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 100),
    st.floats(0, 0.1),
)
def test_every_slice_runs_as_many_micro_batches_and_none_is_over_the_budget(
    lengths, slices, budget, attention
):
    """As ranks do: each plans its share, then all fill up to the one with the most."""
    shares = shares_of(lengths, slices, attention)
    assert sorted(n for share in shares for n in share.lengths.tolist()) == sorted(lengths)
    own = [plan_micro_batches(share.lengths.tolist(), budget) for share in shares]
    most = max(map(len, own))
    plans = [plan_micro_batches(share.lengths.tolist(), budget, count=most) for share in shares]
    assert {len(plan) for plan in plans} == {most}
    for plan, share in zip(plans, shares, strict=True):
        sizes = share.lengths.tolist()
        assert sorted(i for members in plan for i in members) == list(range(len(sizes)))
        for members in plan:
            tokens = sum(sizes[i] for i in members)
            assert tokens <= budget or len(members) == 1  # a sequence that is longer is alone


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 8), st.floats(0, 0.1))
def test_slices_are_even_in_the_work_that_sequences_are(lengths, slices, attention):
    """Never more apart than the longest sequence is work: what the largest differencing method gives."""
    shares = shares_of(lengths, slices, attention)
    work = [sum(n + attention * n * n for n in share.lengths.tolist()) for share in shares]
    longest = max(n + attention * n * n for n in lengths)
    assert max(work) - min(work) <= longest * (1 + 1e-9)


def request(number, prompt_tokens=2):
    prompt = Prompt(f"train:{number // 2}", [1] * prompt_tokens, "")
    return Request(
        f"0:{number}", prompt, Sampling(max_response_tokens=4, seed=number), number // 2, number % 2
    )


def rollout(asked):
    zeros = torch.zeros(1)
    copied = Prompt(asked.prompt.id, asked.prompt.token_ids, "")
    return Rollout(asked.id, copied, zeros, zeros, zeros, zeros, "stop", asked.group_id, asked.index)


def test_requests_are_shared_out_evenly():
    requests = [request(number, prompt_tokens=1 + number) for number in range(9)]
    shares = split_requests(requests, 3)
    tokens = [sum(len(r.prompt.token_ids) + 4 for r in share) for share in shares]
    assert max(tokens) - min(tokens) <= 3
    assert sorted(r.id for share in shares for r in share) == sorted(r.id for r in requests)


def test_requests_that_come_one_by_one_go_where_the_least_is_left_to_do():
    running = Running(2)
    requests = [request(number) for number in range(6)]  # 6 tokens each
    assert [[r.id for r in share] for share in running.share(requests[:3])] == [["0:0", "0:2"], ["0:1"]]
    assert running.left == [12, 6]
    assert [[r.id for r in share] for share in running.share(requests[3:4])] == [[], ["0:3"]]
    found = running.merge([[rollout(requests[2])], [rollout(requests[1])]])
    assert [r.prompt for r in found] == [requests[2].prompt, requests[1].prompt]
    assert found[0].prompt is requests[2].prompt
    running.forget(["0:0", "never asked"])
    assert running.left == [0, 6]
    assert [[r.id for r in share] for share in running.share(requests[4:])] == [["0:4", "0:5"], []]
    assert running.merge([None, None]) is None


def requests_of(*sizes):
    """Groups of so many, each of a prompt of its own; ids are the group's and the place in it."""
    firsts = [request(number) for number in range(len(sizes))]
    return [
        dataclasses.replace(first, id=f"{number}:{index}", index=index)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        for index in range(size)
    ]


def test_requests_of_one_prompt_go_to_one_slice_where_groups_stay_whole():
    running, requests = Running(2), requests_of(4, 1, 1, 2)
    shares = running.share(requests)
    assert [[r.id for r in share] for share in shares] == [
        ["0:0", "0:1", "0:2", "0:3"],
        ["1:0", "2:0", "3:0", "3:1"],
    ]
    assert (running.left, running.under_way) == ([24, 24], [4, 4])
    assert running.forget(["0:1"]) == {0: ["0:1"]}


def test_fewer_groups_than_slices_are_split_so_that_none_has_nothing_to_do():
    running = Running(4)
    assert [len(share) for share in running.share(requests_of(4, 4))] == [2] * 4
    # with what is under way there is a group for each, and of two slices they are whole again
    assert [len(share) for share in running.share(requests_of(4, 4))] == [4, 4, 0, 0]
    assert [len(share) for share in running.share(requests_of(4), [2, 3])] == [0, 0, 4, 0]


def test_lists_of_rollouts_are_joined_and_anything_else_is_the_first_slices():
    first, second = rollout(request(0)), rollout(request(1))
    assert merge_plain([[first], [second]]) == [first, second]
    assert merge_plain([None, None]) is None
    assert merge_plain([[1], [2]]) == [1]


def test_a_future_of_many_is_done_with_the_last_and_fails_with_any():
    futures = [Future(), Future()]
    whole = merge_futures(futures)
    futures[1].set_result("b")
    assert not whole.done()
    futures[0].set_result("a")
    assert whole.result() == "a"
    futures = [Future(), Future()]
    whole = merge_futures(futures)
    futures[0].set_result(None)
    futures[1].set_exception(OSError("full"))
    with pytest.raises(OSError, match="full"):
        whole.result()
