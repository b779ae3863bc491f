from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_core.data.rows import MAX_ROW_BYTES, BadRow, MemoryRows, Rows
from engine_core.errors import DataError


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_jsonl_rows_keep_their_own_columns_and_types(tmp_path):
    rows = Rows([write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "x", "b": [2]}\n')])
    assert [rows.row(0), rows.row(1)] == [{"a": 1}, {"a": "x", "b": [2]}]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    rows = Rows([write(tmp_path / "a.jsonl", b'\n{"a": 1}\n  \n{"a": 2}')])
    assert len(rows) == 2
    assert rows.row(1) == {"a": 2}
    assert rows.where(1) == "a.jsonl:4"


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    rows = Rows([write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')])
    assert [rows.row(0), rows.row(1)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": }', "not valid JSON (Expecting value at column 7)"),
        (b'{"a": "\xff"}', "not valid UTF-8 (byte 0xff at column 8)"),
        (b"[1]", "a row must be an object of columns, got list"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
    ],
)
def test_a_bad_line_says_why_and_spares_the_others(tmp_path, line, reason):
    rows = Rows([write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')])
    with pytest.raises(BadRow) as caught:
        rows.row(1)
    assert str(caught.value).startswith(reason)
    assert rows.where(1) == "a.jsonl:2"
    assert rows.row(2) == {"a": 3}


def test_a_huge_line_is_refused_without_being_parsed(tmp_path):
    huge = json.dumps({"a": "x" * MAX_ROW_BYTES}).encode()
    rows = Rows([write(tmp_path / "a.jsonl", huge + b'\n{"a": 2}\n')])
    assert len(rows) == 2
    with pytest.raises(BadRow, match="the line is longer than 8,388,608 bytes"):
        rows.row(0)
    assert rows.where(1) == "a.jsonl:2"
    assert rows.row(1) == {"a": 2}


def test_a_json_list_is_a_file_of_rows(tmp_path):
    rows = Rows([write(tmp_path / "a.json", b' [{"a": 1}, {"a": 2}]')])
    assert rows.row(1) == {"a": 2}
    assert rows.where(1) == "a.json, item 1"


def test_a_broken_json_list_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.json' begins as a JSON list and is not one: Expecting"):
        Rows([write(tmp_path / "a.json", b'[{"a": 1}')])


def test_a_csv_value_may_be_long(tmp_path):
    long = "x " * 100_000
    rows = Rows([write(tmp_path / "a.csv", f"prompt,answer\n{long},4\n".encode())])
    assert rows.row(0) == {"prompt": long, "answer": "4"}


def test_csv_values_stay_text(tmp_path):
    rows = Rows([write(tmp_path / "a.csv", b'q,answer\n"1,\n2",007\nx,NA\ny,\n')])
    assert [rows.row(i) for i in range(3)] == [
        {"q": "1,\n2", "answer": "007"},
        {"q": "x", "answer": "NA"},
        {"q": "y", "answer": ""},
    ]
    assert [rows.where(i) for i in range(3)] == ["a.csv:2", "a.csv:4", "a.csv:5"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", "a.csv:3: not valid CSV (3 fields where the header has 2)."),
        (b"a,b\n1\n", "a.csv:2: not valid CSV (1 fields where the header has 2)."),
        (b'a,b\n1,2\n"x,1\n', "a.csv:3: not valid CSV (unexpected end of data)."),
        (b"a,b\n1,2\n\xff,1\n", "a.csv:3: not valid UTF-8. Save the file as UTF-8."),
        (b"a,a\n1,2\n", "a.csv' has more than one column 'a'."),
        (b"a,b\n", "a.csv' has 0 rows."),
        (b"", "a.csv' is empty (0 bytes). Expected at least one row."),
    ],
)
def test_a_csv_file_that_does_not_hold_together_is_refused_by_line(tmp_path, content, message):
    with pytest.raises(DataError) as caught:
        Rows([write(tmp_path / "a.csv", content)])
    assert str(caught.value).endswith(message)


def test_parquet_rows_have_their_types(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi"}], "n": 7, "info": {"level": 2}}
    pq.write_table(pa.Table.from_pylist([row, {**row, "n": 8}]), tmp_path / "a.parquet")
    rows = Rows([str(tmp_path / "a.parquet")])
    assert len(rows) == 2
    assert rows.row(1) == {**row, "n": 8}
    assert rows.where(1) == "a.parquet, row 1"


def test_categories_of_several_row_groups_are_values(tmp_path):
    tables = [
        pa.table({"level": pa.array(levels).dictionary_encode()})
        for levels in (["easy", "hard"], ["hardest", "easy"])
    ]
    with pq.ParquetWriter(tmp_path / "a.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    rows = Rows([str(tmp_path / "a.parquet")])
    assert [rows.row(i)["level"] for i in range(4)] == ["easy", "hard", "hardest", "easy"]


def test_a_huge_parquet_value_is_a_bad_row(tmp_path):
    pq.write_table(pa.table({"prompt": ["x" * (MAX_ROW_BYTES + 1), "y"]}), tmp_path / "a.parquet")
    rows = Rows([str(tmp_path / "a.parquet")])
    with pytest.raises(BadRow, match="column 'prompt' is longer than 8,388,608 bytes"):
        rows.row(0)
    assert rows.row(1) == {"prompt": "y"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"hello", "is no Parquet file"), (b"PAR1" + b"\0" * 64 + b"PAR1", "cannot be read: ")],
)
def test_a_broken_parquet_file_is_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=rf"\[data\] '.*a\.parquet' {message}"):
        Rows([write(tmp_path / "a.parquet", content)])


def test_an_empty_parquet_table_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet' has 0 rows\."):
        Rows([str(tmp_path / "a.parquet")])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty (0 bytes). Expected at least one row."), (b"\n \n", "has 0 rows.")],
)
def test_a_jsonl_file_without_rows_is_refused(tmp_path, content, message):
    with pytest.raises(DataError) as caught:
        Rows([write(tmp_path / "a.jsonl", content)])
    assert str(caught.value) == f"[data] '{tmp_path / 'a.jsonl'}' {message}"


def test_an_absent_file_is_named_with_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl", b"{}\n")
    with pytest.raises(DataError) as caught:
        Rows([str(tmp_path / "trian.jsonl")])
    assert (
        str(caught.value)
        == f"[data] there is no file '{tmp_path / 'trian.jsonl'}'. Did you mean '{tmp_path / 'train.jsonl'}'?"
    )


def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        DataError, match=r"has the ending '\.xml'. Expected one of \.jsonl, \.json, \.csv, \.parquet\."
    ):
        Rows([write(tmp_path / "a.xml", b"<a/>")])


def test_files_follow_one_another(tmp_path):
    first = write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": 2}\n')
    second = write(tmp_path / "b.csv", b"a\n3\n")
    rows = Rows([first, second])
    assert [rows.row(i)["a"] for i in range(len(rows))] == [1, 2, "3"]
    assert [rows.where(i) for i in range(3)] == ["a.jsonl:1", "a.jsonl:2", "b.csv:2"]


def test_the_fingerprint_is_the_hash_of_the_bytes(tmp_path):
    content = b'{"a": 1}\n'
    assert Rows([write(tmp_path / "a.jsonl", content)]).fingerprint() == [
        {"file": "a.jsonl", "rows": 1, "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert Rows([MemoryRows([{}])]).fingerprint() == [{"file": "rows in memory", "rows": 1}]


def test_the_arrow_files_go_with_the_rows_and_nothing_lands_at_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    pq.write_table(pa.table({"a": [3]}), tmp_path / "a.parquet")
    rows = Rows([str(tmp_path / "a.parquet")])
    cache = Path(rows.cache)
    assert Rows([str(tmp_path / "a.parquet")], rows.cache).row(0) == {"a": 3}  # in another process
    assert any(cache.rglob("*.arrow"))
    del rows
    assert not cache.exists()
    assert list(home.iterdir()) == []


def test_local_files_need_no_network(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(Rows([write(tmp_path / "a.csv", b"a\n3\n")])) == 1
    assert os.path.exists(tmp_path / "a.csv")


def test_no_files_have_no_fingerprint():
    assert Rows([]).fingerprint() == []
