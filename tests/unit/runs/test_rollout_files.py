"""Rollouts written and read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from engine_core.errors import DataError
from engine_core.runs import rollout_files
from engine_core.runs.rollout_files import RolloutFile, read_rollouts, rollout_path, step_of, write_rollouts
from engine_core.types import Prompt, Rollout, sequences_of


def rollout(index: int = 0, response: tuple[int, ...] = (7, 1), **changes) -> Rollout:
    tokens = [5, 9, *response]
    made = Rollout(
        request_id=f"r{index}",
        prompt=Prompt("train:17", [5, 9], 'What is "2+2"?\n', {"answer": "4", "info": {"k": [1, None]}}),
        token_ids=torch.tensor(tokens),
        loss_mask=torch.tensor([False, False] + [True] * len(response)),
        rollout_log_probs=torch.tensor([0.0, 0.0] + [-0.1 - i for i in range(len(response))]),
        policy_versions=torch.tensor([0, 0] + [3] * len(response), dtype=torch.int32),
        finish_reason="stop",
        group_id=4,
        index=index,
        text="vier ✓",
        reward=0.75,
        rewards={"math": 1.0, "format": None},
    )
    return dataclasses.replace(made, **changes)


def assert_same(a: Rollout, b: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, field.name
            assert torch.equal(x, y), field.name
        elif field.name == "extras":
            assert x.keys() == y.keys()
            for name in x:
                assert x[name].dtype == y[name].dtype
                assert torch.equal(x[name], y[name])
        else:
            assert x == y, field.name


def test_what_is_read_equals_what_was_written(tmp_path):
    extras = {
        "support_log_mass": torch.tensor([0.0, 0.0, -0.25, -0.5]),
        "router": torch.arange(8, dtype=torch.int16).reshape(4, 2),
        "half": torch.tensor([1.5, -2.0, 0.0, 3.0], dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 3),
    }
    written = [
        rollout(0, extras=extras),
        rollout(1, response=(), text="", finish_reason="length", rewards={}, valid=False),
        rollout(2, response=(3, 3, 3, 3, 3), reward=-1e-9),
        rollout(
            3,
            failure="timeout",
            valid=False,
            messages=[{"role": "assistant", "content": "✓"}, {"role": "tool", "content": "4"}],
        ),
    ]
    file = write_rollouts(tmp_path, 12, written)
    assert file == tmp_path / "step_000012.parquet"
    read = read_rollouts(file)
    assert len(read) == 4
    for a, b in zip(written, read, strict=True):
        assert_same(a, b)


def test_arrays_hold_the_same_values_and_leave_out_what_numpy_lacks(tmp_path):
    write_rollouts(
        tmp_path / "step.parquet",
        1,
        [
            rollout(0, extras={"turns": torch.tensor([0, 0, 1, 2])}),
            rollout(1, extras={"half": torch.ones(1).bfloat16()}),
        ],
    )
    tensors, arrays = (read_rollouts(tmp_path / "step.parquet", arrays=flag) for flag in (False, True))
    for one, other in zip(tensors, arrays, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert other.loss_mask.tolist() == one.loss_mask.tolist()
        assert other.response_length == one.response_length == 2
    assert [list(each.extras) for each in arrays] == [["turns"], []]
    assert arrays[0].extras["turns"].tolist() == [0, 0, 1, 2]


def test_any_parquet_reader_shows_the_rows(tmp_path):
    file = write_rollouts(tmp_path / "x.parquet", 3, [rollout()])
    (row,) = pq.read_table(file).to_pylist()
    assert (row["step"], row["prompt_id"], row["response"], row["reward"]) == (3, "train:17", "vier ✓", 0.75)
    assert row["token_ids"] == [5, 9, 7, 1]
    assert dict(row["rewards"]) == {"math": 1.0, "format": None}


def test_some_rows_are_read_in_the_order_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_files, "ROWS_AT_ONCE", 3)
    written = [rollout(i, response=(7,) * (i + 1)) for i in range(10)]
    file = rollout_files.RolloutFile(write_rollouts(tmp_path, 1, written))
    assert pq.ParquetFile(file.path).num_row_groups == 4
    assert len(file) == 10
    for rows in ([9, 0, 4], [], [5], list(range(10))[::-1], [2, 2]):
        for row, read in zip(rows, file.rollouts(rows), strict=True):
            assert_same(written[row], read)
    assert file.table(["index", "reward"]).column_names == ["index", "reward"]
    assert file.table(["index"])["index"].to_pylist() == list(range(10))


def test_what_all_rows_have_in_common_stands_in_the_file(tmp_path):
    file = write_rollouts(tmp_path, 1, [rollout()], {"temperature": 0.7, "tokenizer": "abc"})
    assert rollout_files.RolloutFile(file).about == {"format": 3, "temperature": 0.7, "tokenizer": "abc"}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (b'{"format": 4}', "is of format 4; this version reads format 3"),
        (b'{"format": "x"}', "is not a file of rollouts"),
        (b"[1]", "is not a file of rollouts"),
        (b"\xff", "is not a file of rollouts"),
    ],
)
def test_a_file_of_another_or_no_format_is_refused(tmp_path, about, said):
    file = write_rollouts(tmp_path, 1, [rollout()])
    pq.write_table(pq.read_table(file).replace_schema_metadata({rollout_files.ABOUT: about}), file)
    with pytest.raises(DataError, match=said):
        read_rollouts(file)


def test_a_missing_column_is_named(tmp_path):
    file = write_rollouts(tmp_path, 1, [rollout()])
    pq.write_table(pq.read_table(file).drop_columns(["loss_mask", "valid"]), file)
    with pytest.raises(DataError, match=r"it has no column valid, loss_mask"):
        read_rollouts(file)


def test_a_column_of_another_kind_is_refused(tmp_path):
    import pyarrow as pa

    file = write_rollouts(tmp_path, 1, [rollout()])
    rows = pq.read_table(file)
    texts = rows.set_column(rows.column_names.index("token_ids"), "token_ids", pa.array([["a"]]))
    pq.write_table(texts, file)
    with pytest.raises(DataError, match="is not a file of rollouts"):
        read_rollouts(file)


def test_no_rollouts_are_a_file_too(tmp_path):
    assert read_rollouts(write_rollouts(tmp_path, 1, [])) == []


def test_a_second_writing_replaces_the_file_and_leaves_no_other(tmp_path):
    write_rollouts(tmp_path, 1, [rollout(0), rollout(1)])
    write_rollouts(tmp_path, 1, [rollout(5)])
    assert [r.index for r in read_rollouts(tmp_path / "step_000001.parquet")] == [5]
    assert [file.name for file in tmp_path.iterdir()] == ["step_000001.parquet"]


def test_a_writing_that_fails_leaves_the_old_file(tmp_path):
    write_rollouts(tmp_path, 1, [rollout(0)])
    with pytest.raises(Exception, match="seven"):
        write_rollouts(tmp_path, 1, [rollout(1, reward="seven")])
    assert [r.index for r in read_rollouts(tmp_path / "step_000001.parquet")] == [0]


def test_the_step_of_a_file_is_in_its_name_and_other_files_have_none():
    assert step_of(rollout_path(Path("runs"), 12)) == 12
    assert step_of(Path("step_1234567.parquet")) == 1234567
    assert [step_of(Path(name)) for name in ("step_000012_good.parquet", "mine.parquet")] == [None, None]


def test_branches_are_rows_of_a_file_and_return_to_their_rollouts(tmp_path):
    branched = rollout(0, branches=[rollout(1, response=(8,), reward=0.0), rollout(2, response=(9,))])
    file = write_rollouts(tmp_path, 1, [branched, rollout(3)])
    assert [r.request_id for r in RolloutFile(file).rollouts()] == ["r0", "r0/1", "r0/2", "r3"]
    first, second = read_rollouts(file)
    assert [len(r.branches) for r in (first, second)] == [2, 0]
    for read, expected in zip(sequences_of([first]), sequences_of([branched]), strict=True):
        read.branches = expected.branches = []
        assert_same(read, expected)


def test_ids_with_a_slash_that_are_not_of_a_branch_are_rollouts(tmp_path):
    rows = [dataclasses.replace(rollout(i), request_id=f"gsm8k/{i}") for i in range(3)]
    assert len(read_rollouts(write_rollouts(tmp_path, 1, rows))) == 3


def test_columns_that_json_does_not_know_become_text(tmp_path):
    odd = Prompt("p", [5, 9], "", {"when": __import__("datetime").date(2026, 1, 2)})
    (read,) = read_rollouts(write_rollouts(tmp_path, 1, [rollout(prompt=odd)]))
    assert read.prompt.columns == {"when": "2026-01-02"}


def test_an_absent_step_names_those_that_are_there(tmp_path):
    for step in (2, 4):
        write_rollouts(tmp_path, step, [])
    with pytest.raises(DataError, match=r"holds step_000002\.parquet to step_000004\.parquet"):
        read_rollouts(tmp_path / "step_000003.parquet")


@pytest.mark.parametrize("content", [b"no parquet at all, just bytes", b""])
def test_a_file_that_is_no_parquet_is_named(tmp_path, content):
    file = tmp_path / "step_000001.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"step_000001\.parquet is not a file of rollouts"):
        read_rollouts(file)


def test_extras_that_are_broken_are_named(tmp_path):
    import pyarrow as pa

    file = write_rollouts(tmp_path, 1, [rollout(extras={"a": torch.zeros(4)})])
    rows = pq.read_table(file)
    broken = pa.array([rows["extras"][0].as_py()[:-1]], pa.binary())
    pq.write_table(rows.set_column(rows.column_names.index("extras"), "extras", broken), file)
    with pytest.raises(DataError, match=r"step_000001\.parquet is not a file of rollouts \(.*deserializing"):
        read_rollouts(file)
