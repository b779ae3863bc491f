"""The order of a mix, compared with a slow reference that is written from the documentation."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.config.models import DataConfig
from engine_core.data import PromptSource
from engine_core.data.order import order_of, shares
from engine_core.errors import DataError


def parts_of(sizes, weights):
    ends = np.cumsum([0, *sizes]).tolist()
    return [(w, range(a, b)) for w, a, b in zip(weights, ends, ends[1:], strict=False)]


def reference(sizes, counts, seed, epochs):
    """Row numbers of each epoch: an iterator per part, one row at a time."""

    def rows_of(part):
        first, turn = sum(sizes[:part]), 0
        while True:
            turned = range(sizes[part])
            if seed is not None:
                turned = np.random.default_rng([seed, turn, part + 1]).permutation(sizes[part])
            yield from (first + int(row) for row in turned)
            turn += 1

    endless = [rows_of(part) for part in range(len(sizes))]
    for epoch in range(epochs):
        owners = [part for part, count in enumerate(counts) for _ in range(count)]
        if seed is None:
            place = {(part, i): Fraction(2 * i + 1, 2 * n) for part, n in enumerate(counts) for i in range(n)}
            owners = [part for part, _ in sorted(place, key=lambda each: (place[each], each[0]))]
        else:
            owners = np.random.default_rng([seed, epoch]).permutation(owners)
        yield [next(endless[part]) for part in owners]


MIXES = st.integers(2, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 9), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.3, 0.5, 1, 2.5]), min_size=n, max_size=n),
    )
)


@settings(max_examples=60)
@given(mix=MIXES, seed=st.none() | st.integers(0, 2**63 - 1))
def test_a_mix_is_what_the_slow_reference_gives_for_every_epoch(mix, seed):
    parts, sizes = parts_of(*mix), mix[0]
    try:
        counts = shares(parts)
    except DataError:
        assert min(w / sum(mix[1]) for w in mix[1]) * sum(sizes) < 1
        return
    expected = list(reference(sizes, counts, seed, epochs=5))
    assert [order_of(parts, seed, epoch).tolist() for epoch in range(5)] == expected


@settings(max_examples=60)
@given(mix=MIXES, seed=st.none() | st.integers(0, 2**32))
def test_shares_are_the_weights_within_a_row_and_a_part_repeats_only_when_it_is_through(mix, seed):
    parts, (sizes, weights) = parts_of(*mix), mix
    try:
        counts = shares(parts)
    except DataError:
        return
    seen = [[] for _ in sizes]
    for epoch in range(6):
        order = order_of(parts, seed, epoch).tolist()
        assert len(order) == sum(sizes)
        for number, (weight, rows) in enumerate(parts):
            drawn = [row for row in order if row in rows]
            assert len(drawn) == counts[number]
            assert abs(len(drawn) - sum(sizes) * weight / sum(weights)) < 1
            seen[number] += drawn
    for size, drawn in zip(sizes, seen, strict=True):
        for start in range(0, len(drawn), size):
            turn = drawn[start : start + size]
            assert len(set(turn)) == len(turn)


def test_remainders_go_to_the_largest_and_of_equal_ones_to_the_first():
    assert shares(parts_of([5, 5], [1, 3])) == [3, 7]  # 2.5 and 7.5
    assert shares(parts_of([4, 3, 3], [1, 1, 1])) == [4, 3, 3]
    assert shares(parts_of([4, 4], [0.7, 0.3])) == [6, 2]  # 5.6 and 2.4
    assert shares(parts_of([1000, 3000], [7, 3])) == [2800, 1200]


def test_without_shuffle_parts_are_spread_evenly():
    order = order_of(parts_of([4, 2], [2, 1]), None, 0)
    assert order.tolist() == [0, 4, 1, 2, 5, 3]
    assert order_of(parts_of([4, 2], [1, 1]), None, 1).tolist() == [3, 5, 0, 4, 1, 5]


def test_a_part_without_a_row_is_refused():
    with pytest.raises(DataError) as caught:
        shares(parts_of([40, 3], [1, 0.001]))
    assert str(caught.value) == (
        "[data] mix: part 1 with weight 0.001 gives none of the 43 rows of an epoch. Raise its weight, or remove the part."
    )


# ------------------------------------------------------------------ in a source


@pytest.fixture
def mixed(tmp_path):
    """A ``[data]`` table whose mix has files of these numbers of rows, with weights."""

    def make(sizes, weights, **keys):
        parts = []
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            file = tmp_path / f"{number}.jsonl"
            file.write_text("".join(json.dumps({"prompt": f"{number} {i}"}) + "\n" for i in range(size)))
            parts.append({"path": str(file), "weight": weight})
        return DataConfig(mix=parts, **keys)

    return make


def numbers(prompts):
    return [int(prompt.id.rpartition(":")[2]) for prompt in prompts]


def test_a_source_gives_the_mix_and_counts_the_rows_of_each_part(mixed, tokenizer):
    config = mixed([6, 2], [1, 1])
    config.mix[1].name = "small"
    source = PromptSource(config, tokenizer, seed=3)
    taken = source.take(8)
    assert numbers(taken) == order_of(parts_of([6, 2], [1, 1]), 3, 0).tolist()
    assert Counter(prompt.text[0] for prompt in taken) == {"0": 4, "1": 4}
    assert {k: v for k, v in source.counters.items() if "mix" in k} == {"data/mix/0": 4, "data/mix/small": 4}
    assert source.counters["data/epoch"] == 1
    assert len(source) == 8


def test_the_usable_rows_of_a_mix_are_those_that_its_first_epoch_takes(mixed, tokenizer):
    config = mixed(
        [6, 2], [1, 3], over_long="skip", max_prompt_tokens=3
    )  # 2 rows of the first part, 6 of the second
    long, short = ({"prompt": text} for text in ("0 far too long to be used", "0"))
    Path(config.mix[0].path).write_text("".join(json.dumps(row) + "\n" for row in [long] * 3 + [short] * 3))
    source = PromptSource(config, tokenizer, seed=3)
    order = order_of(parts_of([6, 2], [1, 3]), 3, 0).tolist()
    assert len(source) == sum(row >= 3 for row in order) > 5  # 5 rows of the files are usable
    assert numbers(source.take(len(source))) == [row for row in order if row >= 3]
    assert source.counters["data/epoch"] == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("keys", [{}, {"shuffle": False}], ids=["shuffled", "in order"])
def test_a_resume_at_any_position_of_two_epochs_continues_alike(mixed, tokenizer, keys):
    config = mixed([5, 3], [2, 1], **keys)
    whole = numbers(PromptSource(config, tokenizer, seed=1).take(24))
    for position in range(17):
        source = PromptSource(config, tokenizer, seed=1)
        source.take(position)
        state = json.loads(json.dumps(source.state()))
        resumed = PromptSource(config, tokenizer, seed=2)
        resumed.load_state(state)
        assert resumed.state() == state
        assert resumed.counters == source.counters
        assert numbers(resumed.take(24 - position)) == whole[position:]


def test_workers_give_the_same_mix(mixed, tokenizer):
    config = mixed([5, 3], [2, 1], prompts_per_step=4)
    one = PromptSource(config, tokenizer, seed=1)
    two = PromptSource(config.model_copy(update={"num_workers": 1}), tokenizer, seed=1)
    try:
        assert two.take(20) == one.take(20)
        assert two.state() == one.state()
    finally:
        two.close()


def test_a_changed_mix_refuses_an_old_position(mixed, tokenizer):
    state = PromptSource(mixed([5, 3], [2, 1]), tokenizer, seed=1).state()
    PromptSource(mixed([5, 3], [4, 2]), tokenizer, seed=1).load_state(state)  # the same shares
    with pytest.raises(DataError) as caught:
        PromptSource(mixed([5, 3], [1, 2]), tokenizer, seed=1).load_state(state)
    assert str(caught.value) == (
        "[data] mix changed since the checkpoint, so its position means other rows. [rows, rows in an epoch] of each part "
        "were [[5, 5], [3, 3]], now [[5, 3], [3, 5]]. Restore the parts, or start a new run from the checkpoint's model."
    )
    with pytest.raises(DataError, match=r"its files had \[5, 3\] rows, now \[5, 4\]"):
        PromptSource(mixed([5, 4], [2, 1]), tokenizer, seed=1).load_state(state)
    files = [part.path for part in mixed([5, 3], [2, 1]).mix]
    with pytest.raises(DataError, match=r"mix changed since the checkpoint.* now \[\[8, 8\]\]"):
        PromptSource(DataConfig(train=files), tokenizer, seed=1).load_state(state)


def test_a_part_may_have_several_files_and_another_layout(mixed, tokenizer, tmp_path):
    config = mixed([2, 2], [1, 1], shuffle=False)
    talk = {"conversations": [{"from": "human", "value": "hi"}]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk) + "\n")
    config.mix[1].path = [config.mix[1].path, str(tmp_path / "talk.jsonl")]
    taken = PromptSource(config, tokenizer, seed=0).take(5)
    assert numbers(taken) == [0, 2, 1, 3, 0]  # 2.5 rows each: the first part gives three
    again = PromptSource(config, tokenizer, seed=0).take(7)[5:]
    assert numbers(again) == [1, 4]
    assert again[1].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
