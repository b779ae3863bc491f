"""The file in which a user asks for samplers."""

import pytest

from engine_plugin_processes.scale_requests import FILE, ScaleRequests, read_request, write_request


def test_a_wish_is_told_once_and_a_later_one_again(tmp_path):
    wishes = ScaleRequests(tmp_path, 4)
    assert wishes.new() is None
    write_request(tmp_path, 3)
    assert (wishes.new(), wishes.new()) == (3, None)
    write_request(tmp_path, 3)  # somebody says so again: one was lost meanwhile
    assert (wishes.new(), wishes.new()) == (3, None)
    assert ScaleRequests(tmp_path, 4).new() == 3  # a resumed run
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE]


BROKEN = [
    b"", b"{", b"[3]", b"3", b'{"samplers": 0}', b'{"samplers": 5}', b'{"samplers": true}', b'{"samplers": "3"}',
    b'{"samplers": 2.0}', b"\xff\xfe", b"[" * 1000, b" " * 5000 + b'{"samplers": 3}', b'{"samplers": ' + b"9" * 900 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_says_nothing_that_can_be_done_is_told_once_and_ignored(tmp_path, caplog, text):
    (tmp_path / FILE).write_bytes(text)
    wishes = ScaleRequests(tmp_path, 4)
    assert wishes.new() is None
    assert "is ignored" in caplog.text
    caplog.clear()
    assert wishes.new() is None
    assert not caplog.text
    write_request(tmp_path, 2)
    assert wishes.new() == 2


def test_a_folder_in_its_place_is_ignored(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    assert ScaleRequests(tmp_path, 4).new() is None
    assert "is ignored" in caplog.text


def test_no_file_is_no_wish(tmp_path):
    assert read_request(tmp_path, 4) is None
