import errno

import pytest

from engine_core import faults
from engine_core.errors import EnvironmentProblem
from engine_core.runs.folders import MOST, LineFile, PendingWrites


class Disk:
    """Takes writes while there is room."""

    def __init__(self):
        self.room, self.written = True, []

    def write(self, what):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(what)


@pytest.fixture
def disk():
    return Disk()


def ask(pending, disk, *numbers, small=True):
    for number in numbers:
        pending.do(f"the metrics of step {number}", lambda number=number: disk.write(number), small)


def test_what_a_full_disk_refuses_is_written_once_and_in_order_when_there_is_room(disk, caplog):
    caplog.set_level("INFO", "engine")
    pending = PendingWrites()
    ask(pending, disk, 1)
    disk.room = False
    ask(pending, disk, 2, 3)
    assert pending.waiting == ["the metrics of step 2", "the metrics of step 3"]
    disk.room = True
    ask(pending, disk, 4)
    assert (disk.written, pending.waiting) == ([1, 2, 3, 4], [])
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "The metrics of step 2 cannot be written: [Errno 28] No space left on device. It is kept"
    )
    assert caplog.messages[-1] == "What could not be written before is written now: 3 writes."


def test_flush_tells_that_something_waits_on(disk):
    pending = PendingWrites()
    disk.room = False
    ask(pending, disk, 1, 2)
    with pytest.raises(OSError, match="No space left"):
        pending.flush()
    with pytest.raises(
        EnvironmentProblem, match=r"^The metrics of step 1 and 1 more could not be written: .*engine resume"
    ):
        pending.finish()
    assert len(pending.waiting) == 2
    disk.room = True
    pending.finish()
    assert disk.written == [1, 2]


def test_large_writes_do_not_wait_without_end(disk):
    pending = PendingWrites()
    disk.room = False
    ask(pending, disk, *range(100))
    ask(pending, disk, *range(MOST), small=False)
    with pytest.raises(EnvironmentProblem, match=r"and \d+ more could not be written"):
        ask(pending, disk, 1000, small=False)


def test_another_error_than_of_the_disk_is_not_kept():
    pending = PendingWrites()
    with pytest.raises(ZeroDivisionError):
        pending.do("x", lambda: 1 / 0)
    assert not pending.waiting
    pending.finish()  # at the end of the run, which has failed of it


def test_a_line_that_fails_halfway_leaves_the_file_as_it_was(tmp_path):
    file = LineFile(tmp_path / "lines")
    file.append("one")
    faults.arm("metrics.half_written:nospace")
    try:
        with pytest.raises(OSError, match="No space left"):
            file.append("a line of some length")
    finally:
        faults.arm("")
    assert (tmp_path / "lines").read_text() == "one\n"
    file.append("two")
    file.sync()
    file.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"


def test_a_line_that_is_stopped_halfway_by_the_keyboard_is_whole_after_the_next_try(tmp_path, monkeypatch):
    def stop(name):
        raise KeyboardInterrupt

    file, pending = LineFile(tmp_path / "lines"), PendingWrites()
    with monkeypatch.context() as patched:
        patched.setattr(faults, "point", stop)
        with pytest.raises(KeyboardInterrupt):
            pending.do("x", lambda: file.append("a line of some length"))
    pending.finish()
    file.close()
    assert (tmp_path / "lines").read_text() == "a line of some length\n"


def test_lines_are_appended_to_what_is_there(tmp_path):
    (tmp_path / "lines").write_text("before\n")
    file = LineFile(tmp_path / "lines")
    file.append("größer")
    file.close()
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "before\ngrößer\n"
