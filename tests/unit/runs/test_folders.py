"""Which folder a run is given: a new one, or one in which nothing was trained; never one with anything of a step."""

import errno
import threading
import time
from pathlib import Path

import pytest

from engine_core.config import EngineConfig
from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.runs.tracking import RunFolder


def config_in(folder, name="a"):
    return EngineConfig(run={"dir": str(folder / "runs"), "name": name})


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(config_in(tmp_path))
    yield run
    run.close()


def test_a_name_that_exists_is_refused_and_left_alone(tmp_path, run):
    (run.path / "mine.txt").write_text("kept")
    run.metrics_file.write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(config_in(tmp_path))
    assert "run.name: 'a' exists already" in str(caught.value)
    assert str(caught.value).endswith("or delete it: it holds no checkpoint.")
    (run.checkpoints / "step_00000001").mkdir()
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(config_in(tmp_path))
    assert f"engine resume {tmp_path / 'runs' / 'a'}" in str(caught.value)
    assert (run.path / "mine.txt").read_text() == "kept"


def test_a_folder_in_which_nothing_was_trained_is_taken_over_and_its_log_stays(tmp_path, run):
    (run.attempt_dir / "run.log").write_text("refused")
    (run.path / "notes.txt").write_text("mine")
    run.close()
    again = RunFolder.create(config_in(tmp_path))
    assert (again.path, again.attempt, again.start_step) == (run.path, 1, 0)
    assert (run.attempt_dir / "run.log").read_text() == "refused"
    assert (run.path / "notes.txt").read_text() == "mine"
    assert again.attempt_dir.is_dir()
    again.close()
    assert RunFolder.create(config_in(tmp_path)).attempt == 2


TRAINED = [
    "metrics.jsonl",
    "rollouts/step_000001.parquet",
    "checkpoints/model.safetensors",
]


@pytest.mark.parametrize("file", TRAINED)
def test_a_folder_with_anything_of_a_step_is_left_alone(tmp_path, run, file):
    (run.path / file).write_text("kept")
    run.close()
    before = sorted(run.path.rglob("*"))
    with pytest.raises(
        ConfigError, match=r"run\.name: 'a' exists already in .*, or delete it: it holds no checkpoint"
    ):
        RunFolder.create(config_in(tmp_path))
    assert (run.path / file).read_text() == "kept"
    assert sorted(run.path.rglob("*")) == before


def test_a_folder_of_somebody_else_is_none_of_a_start_and_an_empty_one_is_as_good_as_new(tmp_path):
    (theirs := tmp_path / "runs" / "a" / "logs").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.create(config_in(tmp_path))
    theirs.rmdir()
    assert RunFolder.create(config_in(tmp_path)).attempt == 0


def test_a_link_to_a_folder_is_not_taken_over_and_what_lies_beside_that_folder_stays(tmp_path):
    (disk := tmp_path / "disk" / "empty").mkdir(parents=True)
    (beside := disk.with_name("latest")).write_text("theirs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(disk)
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.create(config_in(tmp_path))
    assert list(disk.iterdir()) == []
    assert beside.read_text() == "theirs"


def test_a_checkpoint_folder_that_is_a_link_is_somebody_elses(tmp_path, run):
    run.close()
    (tmp_path / "large").mkdir()
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path / "large")
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.create(config_in(tmp_path))


def test_a_folder_that_another_user_lets_us_read_alone_is_refused_as_one_that_exists(
    tmp_path, run, monkeypatch
):
    run.close()
    open_file = Path.open

    def as_another_user(path, mode="r", *arguments, **more):
        if path.is_relative_to(run.path) and mode != "r":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, mode, *arguments, **more)

    monkeypatch.setattr(Path, "open", as_another_user)
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.create(config_in(tmp_path))


def test_a_file_of_the_name_latest_is_never_replaced(tmp_path, caplog):
    (latest := tmp_path / "runs" / "latest").parent.mkdir()
    latest.write_text("theirs")
    with caplog.at_level("WARNING", "engine"):
        RunFolder.create(config_in(tmp_path)).close()
    assert latest.read_text() == "theirs"
    assert f"{latest} is no link, and was left alone" in caplog.text


def test_a_copy_of_a_log_folder_is_no_attempt(run):
    (run.logs_dir / "attempt_0_before").mkdir()
    (run.logs_dir / "attempt_0_before" / "config.resolved.toml").write_text("theirs")
    run.close()
    run.claim(0)
    assert run.attempt == 1


def test_of_many_starts_at_once_one_gets_the_folder_that_was_left(tmp_path, run):
    run.close()
    held, refused = [], []
    barrier = threading.Barrier(8)

    def start():
        barrier.wait()
        try:
            held.append(RunFolder.create(config_in(tmp_path)))
        except (ConfigError, EnvironmentProblem) as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(held), len(refused)) == (1, 7)
    assert held[0].attempt == 1
    held[0].close()


def test_a_start_that_has_not_trained_yet_is_not_taken_over_while_it_lives(tmp_path, run):
    with pytest.raises(EnvironmentProblem, match=r"is in use by process \d+ on"):
        RunFolder.create(config_in(tmp_path))
    assert not (run.logs_dir / "attempt_1").exists()


def test_without_locks_nobody_knows_whether_a_start_lives_and_it_is_left_alone(tmp_path, run, monkeypatch):
    run.close()

    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.create(config_in(tmp_path))


def test_default_names_are_new_even_in_one_second_and_after_the_clock_went_back(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    names = [RunFolder.create(config_in(tmp_path, None)).path.name for _ in range(3)]
    assert names == ["run-20260102-030405", "run-20260102-030405-2", "run-20260102-030405-3"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentProblem, match=r"run\.dir: cannot make a run folder in .*File exists"):
        RunFolder.create(config_in(tmp_path))
