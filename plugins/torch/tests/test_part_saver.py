"""Parts of a checkpoint that ranks write beside training."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from engine_plugin_torch import sharded_checkpoint
from engine_plugin_torch.sharded_checkpoint import PartSaver
from engine_plugin_torch.shards import Shards

WHOLE = torch.arange(12.0).view(4, 3)


def part(rank):
    """Two rows of four."""
    tensors = {"w": WHOLE[2 * rank : 2 * rank + 2].contiguous()}
    return {"weights": (tensors, {"w": {"shape": [4, 3], "at": [2 * rank, 0]}})}


def test_the_parts_of_two_ranks_are_one_checkpoint(tmp_path):
    for rank in (1, 0):
        PartSaver().write(tmp_path, rank, 2, part(rank), {"mine": rank}, {"ranks": 2}).result()
    assert torch.equal(Shards(tmp_path, "weights").whole("w"), WHOLE)
    assert json.loads((tmp_path / "rank-00001.json").read_text()) == {"mine": 1}
    assert json.loads((tmp_path / "state.json").read_text()) == {"ranks": 2}


def test_only_the_first_rank_writes_what_all_have(tmp_path):
    PartSaver().write(tmp_path, 1, 2, part(1), {}, {"ranks": 2}).result()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "rank-00001.json",
        "weights-00001-of-00002.safetensors",
    ]


def test_what_changes_while_it_is_written_is_saved_as_it_was(tmp_path, monkeypatch):
    begun, go_on, write = threading.Event(), threading.Event(), sharded_checkpoint.write_parts

    def slowly(*args):
        begun.set()
        assert go_on.wait(60)
        write(*args)

    monkeypatch.setattr(sharded_checkpoint, "write_parts", slowly)
    saver, scale = PartSaver(), {"factor": 2.0}
    done = saver.write(tmp_path, 0, 1, part(0), {}, {"loss_scale": scale})
    assert begun.wait(60)
    scale["factor"] = 4.0
    assert not done.done()
    go_on.set()
    saver.wait()
    assert done.done()
    assert json.loads((tmp_path / "state.json").read_text()) == {"loss_scale": {"factor": 2.0}}


def test_what_the_disk_refuses_is_the_error_of_the_future(tmp_path):
    (tmp_path / "file").write_text("in the way")
    saver = PartSaver()
    done = saver.write(tmp_path / "file" / "folder", 0, 1, part(0), {}, {})
    with pytest.raises(OSError, match="file"):
        done.result()
    saver.wait()
