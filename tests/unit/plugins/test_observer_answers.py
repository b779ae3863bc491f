"""What observers return: text ends a run, anything else is a failure of the plugin."""

from __future__ import annotations

import pytest

from engine_core.plugins import PluginSet

SOURCE = """
from engine_core import hookimpl


@hookimpl
def engine_on_event(event):
    return {answer}
"""


@pytest.mark.parametrize(
    ("answer", "answers", "failures"), [("'goal reached'", 1, 0), ("None", 0, 0), ("True", 0, 1), ("0", 0, 1)]
)
def test_only_text_is_an_answer_of_an_observer(tmp_path, monkeypatch, caplog, answer, answers, failures):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "watcher.py"
    file.write_text(SOURCE.format(answer=answer))
    plugins = PluginSet.load({}, [str(file)])
    assert len(plugins.emit("step_finished", 3, {})) == answers
    assert plugins.observer_failures == failures
    assert ("must return text or None" in caplog.text) == bool(failures)
