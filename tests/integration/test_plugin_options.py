"""``[plugin.NAME]``: options of step hooks and observers, in the controller and in a sampler's process; observers that end a run."""

import json

import pytest

from engine_core import load_config
from engine_core.config.dump import dump_toml
from engine_core.errors import ConfigError, PluginError
from engine_core.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("forked_workers")

PLUGIN = """
from pathlib import Path

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Options, OutputPath


class NotesOptions(Options):
    last: int = Field(3, gt=0)
    "Step after which the run ends."
    out: OutputPath = "notes"
    "Folder of what the hooks received."


def note(name, options):
    folder = Path(options.out)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(str(options.last))


@hookimpl
def engine_options():
    return NotesOptions


@hookimpl
def engine_build_model(role, plugin_options):
    note(role, plugin_options)


@hookimpl
def engine_wrap_policy(plugin_options):
    note("units", plugin_options)


@hookimpl
def engine_on_event(event, step, data, plugin_options):
    note(event, plugin_options)
    if event == "run_started":
        earlier = " ".join(f"{line['step']}={line['reward/mean']}" for line in data["earlier"])
        (Path(plugin_options.out) / "earlier").write_text(earlier)
        assert (Path(data["folder"]) / "metrics.jsonl").exists()
    if event in ("step_finished", "evaluated") and step >= plugin_options.last:
        return "Enough."
"""


@pytest.fixture
def settings(tmp_path, world):
    (tmp_path / "notes.py").write_text(PLUGIN)
    return {
        "plugins": [str(tmp_path / "notes.py")],
        "model.path": str(world / "model"),
        "data.train": str(world / "data" / "train.jsonl"),
        "data.prompts_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 4,
        "reward": [{"name": "numeric"}],
        "checkpoint.every_steps": 10,
        "run.dir": str(tmp_path / "runs"),
        "run.name": "r",
        "run.steps": 4,
        "plugin.notes": {"last": 2, "out": str(tmp_path / "notes")},
    }


def load(settings, **changes):
    return load_config({**settings, **changes}, allow_code=True)


def trained(config, resume=None):
    """Train to the end; return the trainer, closed."""
    trainer = Trainer(config)
    trainer.train(resume=resume)
    trainer.close()
    return trainer


def test_an_observer_ends_a_run_with_a_checkpoint_and_a_resume_continues_it(settings, tmp_path, caplog):
    caplog.set_level("INFO", "engine")
    config = load(settings)
    run = trained(config)
    assert run.step_done == 2
    assert "The run ends after step 2. Plugin file" in caplog.text
    assert "Enough." in caplog.text
    assert [p.name for p in (run.folder.path / "checkpoints").iterdir()] == ["step_00000002"]
    events = {"run_started", "step_finished", "rollouts_finished", "weights_synced", "run_finished"}
    events.add("advantages_computed")
    hooks = {"actor", "units"}
    assert {p.name for p in (tmp_path / "notes").iterdir()} == {
        *events,
        *hooks,
        "checkpoint_saved",
        "earlier",
    }
    assert (tmp_path / "notes" / "earlier").read_text() == ""
    (tmp_path / "notes" / "earlier").unlink()
    assert {p.read_text() for p in (tmp_path / "notes").iterdir()} == {"2"}
    assert "last = 2" in dump_toml(config)

    resumed = trained(load(settings, **{"plugin.notes.last": 3}), resume=run.folder.path)
    assert resumed.step_done == 3
    lines = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert [line["step"] for line in recorded] == [1, 2, 3]
    earlier = " ".join(f"{line['step']}={line['reward/mean']}" for line in recorded[:2])
    assert (tmp_path / "notes" / "earlier").read_text() == earlier


def test_the_process_of_a_sampler_has_the_options_too(settings, tmp_path):
    trained(load(settings, **{"rollout.process": {}, "run.steps": 1}))
    assert (tmp_path / "notes" / "rollout").read_text() == "2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"plugin.notes.last": 0},
            "plugin.notes.last: got 0, expected a number above 0. Table of plugin 'notes'.",
        ),
        ({"plugin.notes.lst": 1}, "plugin.notes.lst: unknown key. Did you mean 'last'?"),
        ({"plugin.note.last": 1}, "plugin.note: unknown key. Did you mean 'notes'? Known: notes."),
        (
            {"plugins": []},
            "plugin.notes: unknown key. Known: none. A table [plugin.NAME] is of a plugin in plugins = [...].",
        ),
    ],
)
def test_a_wrong_table_is_named(settings, changes, said):
    with pytest.raises(ConfigError) as caught:
        load(settings, **changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("return 3", "engine_options must return a class derived from Options; it gave 3."),
        ("raise KeyError('x')", "failed in engine_options (while it was loaded): KeyError: 'x'"),
    ],
)
def test_a_hook_that_gives_no_options_is_named(settings, tmp_path, hook, said):
    (tmp_path / "notes.py").write_text(PLUGIN.replace("return NotesOptions", hook))
    with pytest.raises(PluginError) as caught:
        load({key: value for key, value in settings.items() if key != "plugin.notes"})
    assert said in str(caught.value)


SEEN = """
from pathlib import Path

from engine_core import hookimpl

@hookimpl
def engine_on_event(event, step, data):
    with Path("FOLDER/seen").open("a") as file:
        print(event, step, data.get("signal", ""), file=file)
"""


def test_a_run_that_a_signal_stops_says_so_and_which_step_it_saved(settings, tmp_path, monkeypatch):
    (tmp_path / "seen.py").write_text(SEEN.replace("FOLDER", str(tmp_path)))
    monkeypatch.setenv("ENGINE_FAULT", "step.generate@3:term")
    del settings["plugin.notes"]
    with pytest.raises(SystemExit):
        trained(load(settings, plugins=[str(tmp_path / "seen.py")]))
    assert (tmp_path / "seen").read_text().splitlines()[-2:] == [
        "checkpoint_saved 2 ",
        "run_stopped 3 SIGTERM",
    ]
