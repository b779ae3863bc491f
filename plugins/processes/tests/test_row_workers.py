from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine_core.config.models import DataConfig
from engine_core.data import PromptSource
from engine_core.errors import DataError, WorkerLost
from engine_plugin_processes.row_workers import WorkerPool, preparer_of
from engine_plugin_testing import reference

ROWS = [{"prompt": f"What is {i} plus 7?"} for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer()


@pytest.fixture
def config_of(tmp_path):
    """A `[data]` table over rows that are written as JSONL."""

    def make(rows, **keys):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(train=str(path), **keys)

    return make


@pytest.fixture
def source_of(config_of, tokenizer):
    """Sources with workers, ended after the test."""
    made = []

    def make(rows=ROWS, **keys):
        keys = {"num_workers": 2, "prompts_per_step": 4, "shuffle": False, **keys}
        made.append(PromptSource(config_of(rows, **keys), tokenizer, seed=0))
        return made[-1]

    yield make
    for source in made:
        source.close()
        assert source._pool is None


def pids(source) -> list[int]:
    return [worker.popen.pid for worker in source._pool._workers]


def alive(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    )


def test_a_killed_worker_is_named_and_its_rows_are_done_again(source_of, caplog):
    source = source_of()
    source.take(1)
    os.kill(pids(source)[1], signal.SIGKILL)
    names = [prompt.id for prompt in source.take(11 + 12)]
    assert names == [f"train:{i % 12}" for i in range(1, 24)]
    assert source.counters["data/worker_restarts"] == 1
    assert (
        "Data worker 1 is started again: it was killed by SIGKILL (by a user, or for lack of memory) while it did "
        in caplog.text
    )


def test_rows_that_end_two_workers_end_the_run_by_name(source_of):
    source = source_of(num_workers=1)
    ended = threading.Event()

    def hunt() -> None:
        while not ended.is_set():
            for worker in list(source._pool._workers) if source._pool else []:
                worker.popen.kill()
            time.sleep(0.01)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        with pytest.raises(WorkerLost) as caught:
            source.take(100)
    finally:
        ended.set()
        hunter.join()
    assert str(caught.value).startswith("Lost worker data[0] on ")
    assert "killed by SIGKILL (by a user, or for lack of memory) while it did rows from train.jsonl:" in str(
        caught.value
    )
    assert "num_workers = 0" in str(caught.value)


def test_a_problem_of_the_data_reaches_the_controller_as_such(source_of):
    source = source_of(num_workers=1)
    Path(source._config.train).unlink()
    with pytest.raises(DataError, match=r"^Data worker 0: \[data\] there is no file '.*train\.jsonl'\.$"):
        source.take(12)


def test_a_tokenizer_that_changes_when_it_is_saved_is_refused(config_of, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    setup = PromptSource(config_of(ROWS), tokenizer, seed=0)._preparer.setup()
    changed = {**setup, "tokenizer": str(tmp_path), "tokenizer_hash": "of another one"}
    with pytest.raises(DataError, match=r"changes when it is saved and loaded\. Set num_workers = 0"):
        preparer_of(changed)


def test_closing_ends_the_processes_and_removes_the_tokenizer(tokenizer):
    pool = WorkerPool({}, tokenizer, num_workers=1, ahead=1, where=str)
    workers, folder = [worker.popen.pid for worker in pool._workers], Path(pool._folder.path)
    assert all(alive(pid) for pid in workers)
    assert folder.exists()
    pool.close()
    assert not any(alive(pid) for pid in workers)
    assert not folder.exists()


def test_a_script_without_a_main_guard_is_not_run_again_by_its_workers(tmp_path, tokenizer, config_of):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = config_of(ROWS)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.modules['torch'] = None  # which takes seconds to import\n"
        "from engine_core.config.models import DataConfig\n"
        "from engine_core.config.roles import ModelConfig\n"
        "from engine_core.data import PromptSource, load_tokenizer\n"
        f"tokenizer = load_tokenizer(ModelConfig(path={str(tmp_path / 'tokenizer')!r}))\n"
        f"source = PromptSource(DataConfig(train={config.train!r}, num_workers=1, shuffle=False), tokenizer, 0)\n"
        "print([p.id for p in source.take(2)], flush=True)\n"
        "print(source._pool._workers[0].popen.pid)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=True
    )
    said = done.stdout.splitlines()
    assert said[0] == "['train:0', 'train:1']"
    assert len(said) == 2
    # The script never closed its source: its end did.
    assert not alive(int(said[1]))
