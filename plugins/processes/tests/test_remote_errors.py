"""An error of a worker is the same error in the controller: class, message, exit code, notes."""

import errno

import pytest
import torch

from engine_core import errors
from engine_plugin_processes.remote_errors import InWorker, pack, unpack


class Refused(errors.DataError):
    """A subclass, as a plugin may have."""


def crossed(error):
    try:
        raise error
    except type(error) as caught:
        return unpack(pack(caught), rank=3)


@pytest.mark.parametrize(
    "cls",
    [
        errors.ConfigError,
        errors.PluginError,
        errors.DataError,
        errors.EnvironmentProblem,
        errors.TrainingFailed,
    ],
)
def test_our_errors_keep_class_message_exit_code_and_notes(cls):
    error = cls("actor.backend: wrong.\nactor.path: wrong too.")
    error.add_note("a note")
    found = crossed(error)
    assert type(found) is cls
    assert (str(found), found.exit_code, found.__notes__) == (str(error), error.exit_code, ["a note"])


def test_a_subclass_comes_as_the_nearest_class_of_ours():
    assert type(crossed(Refused("bad"))) is errors.DataError


def test_errors_of_python_keep_their_class_and_others_are_named():
    assert type(crossed(KeyError("no column"))) is KeyError
    assert crossed(KeyError("no column")).args == ("no column",)
    assert type(crossed(torch.OutOfMemoryError("17 GiB"))) is torch.OutOfMemoryError
    assert str(crossed(LookupError("gone"))) == "LookupError: gone"
    assert str(crossed(SystemExit(3))) == "SystemExit: 3"


def test_a_full_disk_is_a_full_disk():
    found = crossed(OSError(errno.ENOSPC, "No space left on device", "weights.safetensors"))
    assert isinstance(found, OSError)
    assert (found.errno, found.filename) == (errno.ENOSPC, "weights.safetensors")
    assert type(crossed(FileNotFoundError(errno.ENOENT, "gone"))) is FileNotFoundError
    assert str(crossed(OSError("weights: no room"))) == "weights: no room"


def test_the_traceback_of_the_worker_is_the_cause():
    found = crossed(ValueError("bad"))
    assert isinstance(found.__cause__, InWorker)
    assert "in worker 3" in str(found.__cause__)
    assert "test_remote_errors.py" in str(found.__cause__)
