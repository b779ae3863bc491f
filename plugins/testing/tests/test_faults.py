import pytest

from engine_core import faults
from engine_core.errors import ConfigError


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.arm("")


def test_nothing_happens_at_a_point_that_is_not_armed():
    faults.arm("step.train:raise")
    faults.point("step.begin")


def test_the_action_happens_at_the_nth_time_and_only_then():
    faults.arm("step.train@3:raise")
    faults.point("step.train")
    faults.point("step.train")
    with pytest.raises(RuntimeError, match=r"ENGINE_FAULT at step\.train"):
        faults.point("step.train")
    faults.point("step.train")


def test_several_faults_wait_for_their_own_points():
    faults.arm("checkpoint.begin:nospace, step.sync:ioerror")
    with pytest.raises(OSError, match="No space left on device"):
        faults.point("checkpoint.begin")
    with pytest.raises(OSError, match="Input/output error"):
        faults.point("step.sync")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step.train", r"'step.train' is no fault. Expected POINT\[@N\]:ACTION"),
        ("step.trian:kill", "unknown point 'step.trian'. Did you mean 'step.train'"),
        ("step.train:kil", "unknown action 'kil'. Did you mean 'kill'"),
        ("step.train@x:kill", "N and seconds must be numbers"),
    ],
)
def test_a_misspelt_fault_is_refused_and_nothing_is_armed(text, message):
    with pytest.raises(ConfigError, match=message):
        faults.arm(text)
    faults.point("step.train")


def test_the_environment_arms_it(monkeypatch):
    monkeypatch.setenv("ENGINE_FAULT", "step.train:raise")
    faults.arm()
    with pytest.raises(RuntimeError):
        faults.point("step.train")
