"""Pairs and judged responses out of rows of every layout; what cannot be used is named."""

import copy
import logging

import pytest

from engine_core.data.rows import open_rows
from engine_core.data.source import Source
from engine_core.errors import DataError
from engine_plugin_trainers.data.preferences import JudgedPreparer, PairPreparer

USER = {"role": "user", "content": "What is 12 plus 7?"}
ASKED = "<|im_start|>user\nWhat is 12 plus 7?<|im_end|>\n<|im_start|>assistant\n"


def says(text):
    return {"role": "assistant", "content": text}


def pair_source(config, tokenizer, limit=100, **keys):
    return source_of(PairPreparer, config, tokenizer, limit, **keys)


def source_of(preparer, config, tokenizer, limit=100, table="dpo", seed=0, held=None):
    rows = open_rows(config, "train", None)
    return Source(preparer(rows, tokenizer, config, "train", limit, table, held), seed)


def texts(tokenizer, ids, mask):
    """What comes before the response, and the response."""
    first = mask.index(True)
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


def both(tokenizer, pair):
    return texts(tokenizer, pair.chosen_ids, pair.chosen_mask), texts(
        tokenizer, pair.rejected_ids, pair.rejected_mask
    )


def test_a_pair_of_texts_shares_the_prompt_and_ends_each_response(config_of, tokenizer):
    row = {"prompt": "12 plus 7 is", "chosen": " 19", "rejected": " 18"}
    (pair,) = pair_source(config_of([row]), tokenizer).take(1)
    assert both(tokenizer, pair) == (("12 plus 7 is", " 19<|im_end|>"), ("12 plus 7 is", " 18<|im_end|>"))
    assert (pair.id, pair.margin) == ("train:0", 0.0)


CONVERSATIONS = [
    {"prompt": [USER], "chosen": [says("19")], "rejected": [says("18")]},
    {"prompt": [USER], "chosen": "19", "rejected": "18"},
    {"prompt": [USER], "chosen": [USER, says("19")], "rejected": [USER, says("18")]},
    {"chosen": [USER, says("19")], "rejected": [USER, says("18")]},
    {"prompt": "a title of the row", "chosen": [USER, says("19")], "rejected": [USER, says("18")]},
    {"prompt": USER["content"], "chosen": [says("19")], "rejected": [says("18")]},
    {
        "chosen": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "19"}],
        "rejected": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "18"}],
    },
]


@pytest.mark.parametrize("row", CONVERSATIONS)
def test_every_layout_of_a_conversation_gives_the_same_pair(config_of, tokenizer, row):
    (pair,) = pair_source(config_of([row]), tokenizer).take(1)
    assert both(tokenizer, pair) == ((ASKED, "19<|im_end|>\n"), (ASKED, "18<|im_end|>\n"))
    learned = [token for token, m in zip(pair.chosen_ids, pair.chosen_mask, strict=True) if m]
    assert tokenizer.decode(learned) == "19<|im_end|>"


def test_the_shared_beginning_may_hold_turns_of_the_assistant(config_of, tokenizer):
    shared = [USER, says("one"), {"role": "user", "content": "two"}]
    row = {"chosen": [*shared, says("three")], "rejected": [*shared, says("four")]}
    (pair,) = pair_source(config_of([row]), tokenizer).take(1)
    learned = [token for token, m in zip(pair.chosen_ids, pair.chosen_mask, strict=True) if m]
    assert tokenizer.decode(learned) == "three<|im_end|>"


BAD = [
    ({"prompt": "a", "chosen": "b"}, r"no column 'rejected' \(\[data\.columns\] rejected\)"),
    ({"prompt": "a", "chosne": "b", "rejected": "c"}, r"no column 'chosen' .*Did you mean 'chosne'\?"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"'chosen' and 'rejected' are the same"),
    ({"chosen": "b", "rejected": "c"}, r"no column 'prompt' .* the end of the prompt is not known"),
    ({"prompt": "a", "chosen": "", "rejected": "c"}, r"the response is empty"),
    ({"prompt": "a", "chosen": 5, "rejected": "c"}, r"column 'chosen' must be text or a list of messages"),
    (
        {"chosen": [says("b")], "rejected": [says("c")]},
        r"share no first message, and no column holds their prompt",
    ),
    (
        {"chosen": [USER, says("b")], "rejected": [USER]},
        r"rejected is only the beginning of the other conversation",
    ),
    (
        {"chosen": [says("a"), USER], "rejected": [says("a"), says("b")]},
        r"chosen\[1\] is where the two conversations differ, and it is not the assistant's",
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
        r"column 'margin' must be a finite number",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, r"must be a finite number"),
]


@pytest.mark.parametrize(("row", "problem"), BAD)
def test_a_pair_that_cannot_be_used_is_named(config_of, tokenizer, row, problem):
    with pytest.raises(DataError, match=rf"^train\.jsonl:1: .*{problem}"):
        pair_source(config_of([row]), tokenizer)


def test_bad_pairs_are_counted_and_skipped(config_of, tokenizer, caplog):
    rows = [{"prompt": "a", "chosen": str(i), "rejected": "1"} for i in range(3)]  # the second is a tie
    source = pair_source(config_of(rows, max_bad_rows=1, shuffle=False), tokenizer)
    with caplog.at_level(logging.WARNING):
        assert [pair.id for pair in source.take(2)] == ["train:0", "train:2"]
    assert source.counters["data/bad_rows"] == 1
    assert "train.jsonl:2: 'chosen' and 'rejected' are the same" in caplog.text


@pytest.mark.parametrize(("given", "margin"), [(0.5, 0.5), ("0.25", 0.25), (None, 0.0), (2, 2.0)])
def test_a_margin_is_a_number_or_absent(config_of, tokenizer, given, margin):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": given}
    assert pair_source(config_of([row]), tokenizer).take(1)[0].margin == margin


def test_columns_can_have_other_names(config_of, tokenizer):
    row = {"question": "a", "good": "b", "bad": "c", "gap": 3}
    names = {"prompt": "question", "chosen": "good", "rejected": "bad", "margin": "gap"}
    (pair,) = pair_source(config_of([row], columns=names), tokenizer).take(1)
    assert (both(tokenizer, pair)[0], pair.margin) == (("a", "b<|im_end|>"), 3.0)
    del row["gap"]
    with pytest.raises(DataError, match=r"no column 'gap' \(\[data\.columns\] margin\)"):
        pair_source(config_of([row], columns=names), tokenizer)


LONG = {"prompt": "4 5 6 7 8 9 4 5 6 7 8 9", "chosen": "9q8q7q6q5q", "rejected": "1"}
SHORT = {"prompt": "one", "chosen": "2", "rejected": "1"}


def test_a_pair_is_over_long_where_one_side_is(config_of, tokenizer, caplog):
    limit = len(tokenizer(LONG["prompt"] + "1")["input_ids"]) + 1  # the rejected side would fit
    source = pair_source(config_of([LONG, SHORT], shuffle=False), tokenizer, limit)
    with caplog.at_level(logging.WARNING):
        assert [pair.id for pair in source.take(1)] == ["train:1"]
    assert source.counters["data/over_long"] == 1
    assert f"[dpo] max_tokens is {limit}" in caplog.text


def test_a_format_of_prompts_is_refused_for_pairs(config_of, tokenizer):
    with pytest.raises(
        DataError, match=r"\[data\] format = 'verl': pairs are read from the columns prompt, chosen"
    ):
        pair_source(config_of([SHORT], format="verl"), tokenizer)


def test_the_position_of_pairs_is_that_of_the_last_one_handed_out(config_of, tokenizer):
    rows = [{"prompt": "a", "chosen": str(i), "rejected": "x"} for i in range(7)]
    source, again = (pair_source(config_of(rows), tokenizer) for _ in range(2))
    source.take(5)
    state = source.state()
    again.load_state(state)
    assert again.take(6) == source.take(6)


def test_workers_give_the_same_pairs_and_judgements(config_of, tokenizer):
    rows = [
        {**SHORT, "chosen": str(i + 5), "margin": i / 2, "completion": "x", "label": i % 2} for i in range(4)
    ]
    for preparer in (PairPreparer, JudgedPreparer):
        found = []
        for workers in (0, 1):
            source = source_of(
                preparer,
                config_of(rows, num_workers=workers, prompts_per_step=2),
                tokenizer,
                100,
                "dpo",
                seed=0,
            )
            try:
                found.append(source.take(6))
            finally:
                source.close()
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("label", "desirable"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), ("0", False)],
)
def test_a_judged_response_has_a_label(config_of, tokenizer, label, desirable):
    row = {"prompt": "12 plus 7 is", "completion": " 19", "label": label}
    (item,) = source_of(JudgedPreparer, config_of([row]), tokenizer, 100, "kto", seed=0).take(1)
    assert texts(tokenizer, item.token_ids, item.loss_mask) == ("12 plus 7 is", " 19<|im_end|>")
    assert item.desirable is desirable


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "completion": "b"}, r"no column 'label' \(\[data\.columns\] label\)"),
        (
            {"prompt": "a", "completion": "b", "label": "good"},
            r"column 'label' must be true or false, got 'good'",
        ),
        ({"prompt": "a", "completion": "b", "label": 0.5}, r"must be true or false, got 0\.5"),
        ({"prompt": "a", "completion": "b", "label": None}, r"must be true or false, got None"),
    ],
)
def test_a_judgement_that_cannot_be_read_is_named(config_of, tokenizer, row, problem):
    with pytest.raises(DataError, match=rf"^train\.jsonl:1: .*{problem}"):
        source_of(JudgedPreparer, config_of([row]), tokenizer, 100, "kto", seed=0)


def test_a_judged_conversation_is_read_whole(config_of, tokenizer):
    row = {"messages": [USER, says("19")], "label": True}
    (item,) = source_of(JudgedPreparer, config_of([row]), tokenizer, 100, "kto", seed=0).take(1)
    assert texts(tokenizer, item.token_ids, item.loss_mask) == (ASKED, "19<|im_end|>\n")


def test_tools_of_a_pair_reach_the_template(config_of, tokenizer):
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = "{{ tools | tojson if tools else '' }}" + str(tokenizer.chat_template)
    row = {"prompt": [USER], "chosen": [says("19")], "rejected": [says("18")], "tools": [{"name": "add"}]}
    (pair,) = pair_source(config_of([row]), shown).take(1)
    asked = '[{"name": "add"}]' + ASKED
    assert both(shown, pair) == ((asked, "19<|im_end|>\n"), (asked, "18<|im_end|>\n"))
