"""Files that commands write."""

from __future__ import annotations

import pytest

from engine_core.config import EngineConfig
from engine_core.runs.tracking import RunFolder


@pytest.mark.parametrize("command", ["grafana", "report first", "trace first", "manifest first"])
def test_a_file_that_cannot_be_written_is_said(engine, tmp_path, command):
    config = EngineConfig(run={"dir": str(tmp_path / "runs"), "name": "first"}, tracking={"trackers": []})
    folder = RunFolder.create(config)
    folder.metrics_file.write_text('{"step": 1, "reward/mean": 0.25}\n')
    (folder.path / "timeline.jsonl").write_text('["controller", "run", "step 1", 1.0, 2.0]\n')
    folder.close()
    answer = engine(*command.split(), "--out", "nosuch/file")
    assert answer.code == 5
    assert answer.err.splitlines()[-1] == (
        "engine: 'nosuch/file' cannot be written: No such file or directory. Choose another place."
    )
