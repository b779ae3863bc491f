from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_core.config.models import ColumnsConfig
from engine_core.data.layouts import Row, convert, detect, with_system
from engine_core.data.rows import BadRow

USER = {"role": "user", "content": "2+2="}
ASSISTANT = {"role": "assistant", "content": "4"}
SHAREGPT = [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]
VERL = {
    "data_source": "sums",
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
}


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"prompt": "2+2=", "answer": "4"}, "prompt"),
        ({"prompt": [USER], "answer": "4"}, "prompt"),
        ({"prompt": "2+2=", "completion": "4"}, "trl"),
        (VERL, "verl"),
        ({"messages": [USER]}, "messages"),
        ({"conversations": SHAREGPT}, "sharegpt"),
        ({"messages": SHAREGPT}, "sharegpt"),
        ({"prompt": "2+2=", "messages": [USER, ASSISTANT]}, "messages"),
    ],
)
def test_a_layout_is_known_by_its_columns(row, layout):
    assert detect(row, ColumnsConfig()) == layout


def test_a_row_of_no_layout_names_the_nearest_column():
    with pytest.raises(BadRow) as caught:
        detect({"promt": "x", "answer": "4"}, ColumnsConfig())
    assert str(caught.value) == (
        "no column 'prompt' ([data.columns] prompt), 'messages' (messages) or 'conversations'. "
        "Did you mean 'promt'? Known: answer, promt."
    )


def test_a_plain_row_keeps_its_other_columns():
    row = convert(
        {"prompt": "2+2=", "answer": "4", "info": {"level": 1}}, "prompt", ColumnsConfig(), learn=False
    )
    assert row == Row("2+2=", None, {"answer": "4", "info": {"level": 1}})


def test_named_columns_are_mapped_and_they_keep_their_names_too():
    columns = ColumnsConfig(prompt="question", answer="solution")
    row = convert({"question": "2+2=", "solution": "4"}, "prompt", columns, learn=False)
    assert row == Row("2+2=", None, {"question": "2+2=", "solution": "4", "answer": "4"})


def test_verl_ground_truth_becomes_the_answer():
    row = convert(VERL, "verl", ColumnsConfig(), learn=False)
    assert row.prompt == [USER]
    assert row.columns["answer"] == "4"
    assert row.columns["data_source"] == "sums"
    assert row.columns["extra_info"] == {"index": 3}


def test_a_verl_row_without_ground_truth_is_bad():
    with pytest.raises(
        BadRow, match=r"column 'reward_model' must hold a ground_truth, got \{'style': 'rule'\}"
    ):
        convert({**VERL, "reward_model": {"style": "rule"}}, "verl", ColumnsConfig(), learn=False)


@pytest.mark.parametrize("layout", ["messages", "sharegpt"])
def test_a_conversation_is_sampled_from_before_its_last_assistant_turn(layout):
    raw = {"messages": [USER, ASSISTANT]} if layout == "messages" else {"conversations": SHAREGPT}
    row = convert(raw, layout, ColumnsConfig(), learn=False)
    assert row.prompt == [USER]
    assert row.columns == {"response": "4"}


def test_a_conversation_is_learned_whole():
    row = convert({"messages": [USER, ASSISTANT]}, "messages", ColumnsConfig(), learn=True)
    assert row == Row([USER, ASSISTANT])


def test_trl_rows_are_learned_from_their_completion():
    assert convert({"prompt": "a", "completion": "b"}, "trl", ColumnsConfig(), learn=True).response == "b"
    row = convert({"prompt": [USER], "completion": [ASSISTANT]}, "trl", ColumnsConfig(), learn=True)
    assert (row.prompt, row.response) == ([USER], [ASSISTANT])


def test_a_sharegpt_system_column_becomes_the_system_message():
    row = convert({"system": "brief", "conversations": SHAREGPT}, "sharegpt", ColumnsConfig(), learn=False)
    assert row.prompt == [{"role": "system", "content": "brief"}, USER]


def test_messages_in_a_csv_cell_are_json():
    row = convert({"messages": json.dumps([USER])}, "messages", ColumnsConfig(), learn=False)
    assert row.prompt == [USER]


def test_keys_that_parquet_fills_with_none_are_left_out_of_messages_and_tools(tmp_path):
    """In other columns None is a value that rewards may read."""

    def of(name, kind):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": name, "arguments": {name: [{name: 1}]}}],
        }
        schema = {"name": name, "parameters": {"properties": {name: {"type": kind}}}}
        return {"messages": [USER, call], "tools": [schema], "info": {name: 1}}

    rows = [of("add", "number"), of("say", "string")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for raw, read in zip(rows, pq.read_table(tmp_path / "rows.parquet").to_pylist(), strict=True):
        assert read != raw
        row = convert(read, "messages", ColumnsConfig(), learn=True)
        assert (row.prompt, row.columns["tools"]) == (raw["messages"], raw["tools"])
        assert row.columns["info"] == {"add": None, "say": None} | raw["info"]


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
    raw = {"messages": [{"role": "user", "content": parts}]}
    assert convert(raw, "messages", ColumnsConfig(), learn=False).prompt == [USER]


def test_other_values_become_plain_text():
    raw = {"prompt": "x", "day": datetime.date(2020, 1, 2), "parts": ({"n": 1},)}
    columns = convert(raw, "prompt", ColumnsConfig(), learn=False).columns
    assert columns == {"day": "2020-01-02", "parts": [{"n": 1}]}


@pytest.mark.parametrize(
    ("raw", "layout", "reason"),
    [
        ({"promt": "x"}, "prompt", "no column 'prompt' ([data.columns] prompt). Did you mean 'promt'? Known: promt."),
        ({"prompt": 5}, "prompt", "column 'prompt' must be text or a list of messages, got 5 (int)"),
        ({"prompt": None}, "prompt", "column 'prompt' must be text or a list of messages, got None (NoneType)"),
        ({"prompt": []}, "prompt", "column 'prompt' must be text or a list of messages, got [] (list)"),
        ({"messages": {}}, "messages", "column 'messages' must be a list of messages, got {} (dict)"),
        ({"messages": "hi"}, "messages", "column 'messages' must be a list of messages, got text that is no JSON"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be a message with role and content, got 'hi' (str)"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages", "messages[1]: content must be text, got 5 (int)"),
        ({"messages": [ASSISTANT]}, "messages", "the conversation has no turn before the assistant's"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_its_layout_says_what_it_has(raw, layout, reason):
    with pytest.raises(BadRow) as caught:
        convert(raw, layout, ColumnsConfig(), learn=False)
    assert str(caught.value) == reason


def test_supervised_rows_need_a_response():
    with pytest.raises(BadRow) as caught:
        convert({"prompt": "x", "respose": "y"}, "prompt", ColumnsConfig(), learn=True)
    assert str(caught.value) == (
        "no column 'response' ([data.columns] response). Did you mean 'respose'? Known: prompt, respose."
    )


def test_an_answer_column_that_was_asked_for_must_be_there():
    with pytest.raises(
        BadRow, match=r"no column 'solution' \(\[data.columns\] answer\)\. Did you mean 'soluton'\?"
    ):
        convert({"prompt": "x", "soluton": 1}, "prompt", ColumnsConfig(answer="solution"), learn=False)


def test_a_system_message_goes_in_front_unless_there_is_one():
    assert with_system([USER], "brief") == [{"role": "system", "content": "brief"}, USER]
    assert with_system([{"role": "system", "content": "own"}, USER], "brief")[0]["content"] == "own"
    assert with_system([USER], None) == [USER]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_are_a_list_of_schemas_also_as_json(value):
    row = convert({"messages": [USER], "tools": value}, "messages", ColumnsConfig(), learn=False)
    assert row.columns["tools"] == [TOOL]
    renamed = {"messages": [USER], "functions": value}
    assert convert(renamed, "messages", ColumnsConfig(tools="functions"), learn=True).columns["tools"] == [
        TOOL
    ]


def test_a_row_without_tools_has_none():
    for row in ({}, {"tools": None}, {"tools": []}, {"tools": ""}):
        assert not convert({"messages": [USER], **row}, "messages", ColumnsConfig(), False).columns.get(
            "tools"
        )
    other = convert({"messages": [USER], "tools": "hammer"}, "messages", ColumnsConfig(tools=""), learn=False)
    assert other.columns == {"tools": "hammer"}


@pytest.mark.parametrize("value", ["hammer", {"name": "add"}, ["add"], '{"name": "add"}'])
def test_tools_of_another_form_are_a_bad_row(value):
    with pytest.raises(BadRow, match="column 'tools' must be a list of JSON schemas, got"):
        convert({"messages": [USER], "tools": value}, "messages", ColumnsConfig(), learn=False)
