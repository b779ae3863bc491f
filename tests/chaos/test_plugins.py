"""Rows 28 to 31: plugins that clash, break, are of another time, or raise while the run goes on."""

import re
import signal
import textwrap

import pytest

pytestmark = pytest.mark.chaos

GOOD = """
from engine_core import hookimpl
from engine_core.specs import Reward


def steady(completions):
    return [float(len(text) % 3) for text in completions]


@hookimpl
def engine_rewards():
    return {"steady": Reward(load=steady)}
"""
STEADY = '[[reward]]\nname = "steady"\nworkers = 0\n'


@pytest.fixture
def install(tmp_path):
    """``install("dist-a", {"rewards": {"x": "mod"}}, {"mod": source})``: a distribution that the started processes find."""
    site = tmp_path / "site"
    site.mkdir()

    def write(name, offers, modules, requires=()):
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
        groups = [
            f"[engine.{kind}]\n" + "".join(f"{offer} = {module}\n" for offer, module in names.items())
            for kind, names in offers.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            (site / f"{module}.py").write_text(textwrap.dedent(source))

    return write


FIND = 'import sys\nsys.path.insert(0, "site")\n'


@pytest.fixture
def run(engine, tiny):
    """A command with the installed distributions on its path."""

    def start(command, changes=None, reward=STEADY, **files):
        path = tiny({"run.steps": 2} | (changes or {}), reward=reward, **files)
        return engine(command, path, prelude=FIND)

    return start


def test_a_name_that_two_distributions_offer_is_an_error_that_names_both_and_the_way_to_choose(install, run):
    for letter in "ab":
        install(f"dist-{letter}", {"rewards": {"steady": f"mod_{letter}"}}, {f"mod_{letter}": GOOD})
    seen = set()
    for command in ("validate", "train", "train"):
        refused = run(command)
        assert refused.code == 3, refused.err
        for wanted in ("dist-a", "dist-b", "'dist-a:steady'"):
            assert wanted in refused.err
        seen.add(refused.err)
    assert len(seen) == 1  # the same every time
    picked = run("train", reward=STEADY.replace("steady", "dist-b:steady"))
    assert picked.code == 0, picked.err
    assert '"dist-b": "1.0"' in picked.err
    assert "dist-a" not in picked.err


def test_a_broken_plugin_hurts_only_runs_that_need_it(install, run, engine):
    install("dist-a", {"rewards": {"steady": "mod_a"}}, {"mod_a": GOOD})
    broken = "import os\n\nraise RuntimeError('no licence')\n"
    install("dist-b", {"rewards": {"bad": "mod_b"}}, {"mod_b": broken})
    assert run("train").code == 0
    needed = run("train", {"run.name": "again"}, reward=STEADY.replace("steady", "bad"))
    assert needed.code == 3
    assert "Plugin 'bad' (dist-b 1.0)" in needed.err
    assert "RuntimeError: no licence" in needed.err
    assert "mod_b.py:3: raise RuntimeError" in needed.err
    assert "Traceback" not in needed.err
    assert "dist-b" in engine("plugins", prelude=FIND).out


def test_engine_plugins_check_shows_which_one_breaks_and_where(install, engine):
    install("dist-b", {"rewards": {"bad": "mod_b"}}, {"mod_b": "import no_such_module\n"})
    checked = engine("plugins", "--check", prelude=FIND)
    assert checked.code == 3
    line = next(line for line in checked.out.splitlines() if "dist-b" in line)
    assert "no_such_module" in line
    assert any("ok" in line for line in checked.out.splitlines() if "engine-core-rl" in line)


MISFITS = {
    "too old": (GOOD, ["engine-core-rl<0.0.1"], "pip install --upgrade engine-core-rl dist-a"),
    "too new": (GOOD, ["engine-core-rl>=99"], "pip install --upgrade engine-core-rl dist-a"),
    "a misspelt hook": (
        GOOD.replace("def engine_rewards", "def engine_reward"),
        [],
        "Did you mean 'engine_rewards'",
    ),
    "a wrong argument": (GOOD.replace("engine_rewards()", "engine_rewards(confg)"), [], "confg"),
    "a promise it does not keep": (GOOD.replace('"steady":', '"other":'), [], "promises the reward 'steady'"),
    "no table": (GOOD.replace('{"steady": Reward(load=steady)}', "7"), [], "engine_rewards"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_plugin_that_does_not_fit_is_refused_before_anything_is_built(install, run, what):
    source, requires, told = MISFITS[what]
    mark = "\nopen('imported', 'w').close()\n"
    install("dist-a", {"rewards": {"steady": "mod_a"}}, {"mod_a": source + mark}, requires)
    refused = run("train")
    assert refused.code == 3, refused.err
    assert "dist-a 1.0" in refused.err
    assert told in refused.err
    assert "Traceback" not in refused.err
    assert "random weights" not in refused.err


@pytest.mark.parametrize("requires", [["engine-core-rl<0.0.1"], ["engine-core-rl>=99"]])
def test_a_plugin_of_another_time_is_not_even_imported(install, run, tmp_path, requires):
    install(
        "dist-a",
        {"rewards": {"steady": "mod_a"}},
        {"mod_a": "open('imported', 'w').close()\n" + GOOD},
        requires,
    )
    assert run("train").code == 3
    assert not (tmp_path / "imported").exists()


WATCHER = """
from engine_core import hookimpl


@hookimpl
def engine_on_event(event):
    if event == "step_finished":
        raise RuntimeError("dashboard down")
"""


def test_an_observer_that_raises_is_counted_and_training_goes_on(engine, tiny, tiny_plugin, metrics):
    run = engine("train", tiny({"run.steps": 3}, plugin=tiny_plugin + WATCHER))
    assert run.code == 0, run.err
    assert [line["plugins/observer_failures"] for line in metrics()] == [0, 1, 2]
    assert "tiny.py" in run.err
    assert "dashboard down" in run.err


BUILDERS = {
    "optimizer": ("engine_build_optimizer(module)", "raise RuntimeError('no optimizer today')"),
    "model": ("engine_build_model(role)", "raise OSError('weights are on holiday')"),
}


@pytest.mark.parametrize("what", BUILDERS)
def test_a_step_hook_that_raises_ends_the_run_and_names_its_plugin(engine, tiny, tiny_plugin, what):
    signature, body = BUILDERS[what]
    run = engine("train", tiny(plugin=f"{tiny_plugin}\n\n@hookimpl\ndef {signature}:\n    {body}\n"))
    assert run.code == 3, run.err
    assert "tiny.py" in run.err
    assert body.split("'")[1] in run.err
    assert not list((engine.folder / "runs").glob("r/checkpoints/step_*"))


def test_a_stage_that_raises_ends_the_run_and_keeps_the_checkpoint(engine, tiny, tiny_plugin):
    stage = """
from engine_core.specs import Stage


def picky(rollouts, step):
    if step == 3:
        raise ValueError("I do not like these")
    return rollouts, {}


@hookimpl
def engine_stages():
    return {"picky": Stage(load=picky)}
"""
    run = engine(
        "train",
        tiny(
            reward='[[reward]]\nname = "bytes_share"\nworkers = 0\n[[stage]]\nname = "picky"\n',
            plugin=tiny_plugin + stage,
        ),
    )
    assert run.code == 3
    assert "tiny.py" in run.err
    assert "stage 'picky' failed: ValueError: I do not like these" in run.err
    assert "Traceback" not in run.err
    kept = [path.name for path in (engine.folder / "runs" / "r" / "checkpoints").glob("step_*")]
    assert "step_00000002" in kept


def test_a_plugin_that_hangs_while_it_is_imported_is_named_and_a_signal_ends_the_run(install, engine, tiny):
    install("dist-a", {"rewards": {"steady": "mod_a"}}, {"mod_a": "import time\n\ntime.sleep(600)\n" + GOOD})
    impatient = FIND + "from engine_core.plugins import modules\nmodules.SLOW_IMPORT_SECONDS = 0.1\n"
    run = engine.start("train", tiny(reward=STEADY), prelude=impatient)
    said = "Plugin 'steady' (dist-a 1.0): 'mod_a' is still being imported after 0.1 s."
    run.until(lambda: said in run.err, "a warning")
    run.send(signal.SIGTERM)
    assert run.wait().code in (143, -signal.SIGTERM)
    assert run.orphans() == []


CRASHES = """

@hookimpl
def engine_on_event(event, step):
    import ctypes, os
    if event == "step_finished" and step == 2 and not os.path.exists("fixed"):
        ctypes.string_at(0)
"""


def test_a_crash_in_native_code_of_a_plugin_shows_its_line_and_a_resume_loses_nothing(
    engine, tiny, tiny_plugin, straight, result
):
    crashes = tiny_plugin + CRASHES
    run = engine("train", tiny(plugin=crashes))
    assert run.code == -signal.SIGSEGV, run.err
    assert re.search(r'tiny\.py", line \d+ in engine_on_event', run.err)
    (engine.folder / "fixed").touch()
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == straight()
