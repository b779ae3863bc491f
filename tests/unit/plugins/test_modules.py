import logging
import os
import py_compile
import sys
import textwrap

import pytest

import engine_core
from engine_core.plugins import modules
from engine_core.plugins.plugin_set import PluginProblems, PluginSet

REWARD = """
    from engine_core import hookimpl
    from engine_core.specs import Reward

    def score(completions):
        return [1.0 for _ in completions]

    @hookimpl
    def engine_rewards():
        return {NAMES: Reward(load=score)}
"""


def reward_module(*names: str) -> str:
    table = ", ".join(f"'{name}': Reward(load=score)" for name in names)
    return REWARD.replace("{NAMES: Reward(load=score)}", "{" + table + "}")


def problems_of(*args, **kwargs) -> list[str]:
    with pytest.raises(PluginProblems) as caught:
        PluginSet.load(*args, **kwargs)
    return [message for _, _, message in caught.value.problems]


# ------------------------------------------------------------------ absent, broken, too old


def test_an_absent_module_asks_for_a_reinstallation(install):
    install("gone", {"rewards": {"absent": "gone_package.plugin"}})

    assert problems_of({"rewards": {"absent"}}) == [
        "Plugin 'absent' (gone 1.0) is absent: its metadata is installed, its module 'gone_package.plugin' is not. "
        "Reinstall the distribution."
    ]


def test_a_missing_dependency_is_a_broken_plugin_and_names_the_plugins_line(install):
    site = install(
        "needy", {"rewards": {"needy": "needy.plugin"}}, {"needy.plugin": "x = 1\nimport not_there\n"}
    )

    assert problems_of({"rewards": {"needy"}}) == [
        "Plugin 'needy' (needy 1.0) is broken, it does not import: ModuleNotFoundError: No module named 'not_there' "
        f"({site}/needy/plugin.py:2: import not_there)"
    ]


def test_a_failure_deep_in_a_library_still_names_the_plugins_own_line(install):
    source = "import json\n\nsettings = json.loads('{')\n"
    site = install("deep", {"rewards": {"deep": "deep_plugin"}}, {"deep_plugin": source})

    (message,) = problems_of({"rewards": {"deep"}})

    assert "is broken, it does not import: JSONDecodeError" in message
    assert f"({site}/deep_plugin.py:3: settings = json.loads('{{'))" in message


def test_a_plugin_that_exits_while_imported_is_broken(install):
    install("quits", {"rewards": {"quits": "mod_quits"}}, {"mod_quits": "import sys\nsys.exit(3)\n"})

    (message,) = problems_of({"rewards": {"quits"}})

    assert "is broken, it does not import: SystemExit: 3" in message


def test_a_plugin_that_hangs_while_imported_is_named(install, monkeypatch, caplog):
    monkeypatch.setattr(modules, "SLOW_IMPORT_SECONDS", 0.05)
    waits = "import time\ntime.sleep(0.5)\n" + textwrap.dedent(reward_module("slow"))
    install("slow", {"rewards": {"slow": "mod_slow"}}, {"mod_slow": waits})

    PluginSet.load({"rewards": {"slow"}})

    assert "Plugin 'slow' (slow 1.0): 'mod_slow' is still being imported after 0.05 s." in caplog.text


def test_a_broken_module_behind_two_names_is_told_once(install):
    install(
        "broken", {"rewards": {"a": "mod_bad", "b": "mod_bad"}}, {"mod_bad": "raise RuntimeError('boom')"}
    )

    assert len(problems_of({"rewards": {"a", "b"}})) == 1


def test_a_plugin_made_for_an_older_core_is_refused_with_both_versions(install):
    install(
        "old",
        {"rewards": {"old": "mod_old"}},
        {"mod_old": "raise RuntimeError"},
        requires=["engine-core-rl<0.1,>=0.0.3"],
    )

    assert problems_of({"rewards": {"old"}}) == [
        f"Plugin 'old' (old 1.0) needs engine-core-rl<0.1,>=0.0.3, but this is engine-core-rl {engine_core.__version__}. "
        "Upgrade the older one: pip install --upgrade engine-core-rl old"
    ]
    assert "mod_old" not in sys.modules


def test_a_plugin_made_for_a_newer_core_is_refused_with_both_versions(install):
    install("new", {"rewards": {"new": "mod_new"}}, requires=["torch", "Engine.Core_RL >=7.2, <8"])

    assert problems_of({"rewards": {"new"}}) == [
        f"Plugin 'new' (new 1.0) needs engine-core-rl<8,>=7.2, but this is engine-core-rl {engine_core.__version__}. "
        "Upgrade the older one: pip install --upgrade engine-core-rl new"
    ]


def test_a_demand_on_the_core_for_an_extra_alone_does_not_count(install):
    install(
        "extra",
        {"rewards": {"extra": "mod_extra"}},
        {"mod_extra": reward_module("extra")},
        requires=["engine-core-rl>=9 ; extra == 'future'", "engine-core-rl>=0.0.1"],
    )

    assert PluginSet.load({"rewards": {"extra"}}).versions()["extra"] == "1.0"


def test_a_malformed_demand_is_said_to_be_one(install):
    install("odd", {"rewards": {"odd": "mod_odd"}}, requires=["engine-core-rl >="])

    (message,) = problems_of({"rewards": {"odd"}})

    assert "has the malformed requirement 'engine-core-rl >=' in its metadata" in message


def test_an_entry_point_must_name_a_module(install):
    install("attr", {"rewards": {"attr": "mod_attr:hooks"}})

    assert problems_of({"rewards": {"attr"}}) == [
        "Plugin 'attr' (attr 1.0) has the entry point value 'mod_attr:hooks'; expected a module, such as 'my_plugin.plugin'"
    ]


# ------------------------------------------------------------------ hooks


def test_a_misspelt_hook_is_an_error_with_the_nearest_hook(install):
    source = (
        reward_module("typo") + "\n    @hookimpl\n    def engine_wrap_polcy(module):\n        return []\n"
    )
    install("typo", {"rewards": {"typo": "mod_typo"}}, {"mod_typo": source})

    (message,) = problems_of({"rewards": {"typo"}})

    assert message.startswith(
        "Plugin 'typo' (typo 1.0): there is no hook 'engine_wrap_polcy'. Did you mean 'engine_wrap_policy'? Known: "
    )


def test_a_wrong_hook_argument_is_an_error_with_the_nearest_argument(install):
    source = (
        reward_module("args") + "\n    @hookimpl\n    def engine_wrap_policy(modul):\n        return []\n"
    )
    install("args", {"rewards": {"args": "mod_args"}}, {"mod_args": source})

    assert problems_of({"rewards": {"args"}}) == [
        "Plugin 'args' (args 1.0): hook 'engine_wrap_policy' has no argument 'modul'. Did you mean 'module'? "
        "Known: module, options, plugin_options, role."
    ]


def test_a_hook_without_its_marker_is_an_error(install):
    source = reward_module("plain") + "\n    def engine_on_event(event):\n        pass\n"
    install("plain", {"rewards": {"plain": "mod_plain"}}, {"mod_plain": source})

    assert problems_of({"rewards": {"plain"}}) == [
        "Plugin 'plain' (plain 1.0): 'engine_on_event' is not marked, so it would never be called. Write @hookimpl above it."
    ]


# ------------------------------------------------------------------ one-file plugins


def test_a_file_beside_the_run_file_brings_a_reward(tmp_path, caplog):
    (tmp_path / "say_seven.py").write_text(
        "\n".join(line[4:] for line in reward_module("seven").splitlines())
    )

    with caplog.at_level(logging.INFO, logger="engine"):
        plugins = PluginSet.load({"rewards": {"seven"}}, ["say_seven.py"], root=tmp_path)

    assert plugins.resolve("rewards", "seven")(["x"]) == [1.0]
    version = plugins.versions()["say_seven.py"]
    assert version.startswith("sha256:")
    assert version.removeprefix("sha256:") in caplog.text  # the log holds the whole hash


def test_what_is_run_is_what_was_hashed_not_a_cached_compilation(tmp_path):
    file = tmp_path / "plug.py"
    file.write_text("value = 1\n")
    first = PluginSet.load({}, ["plug.py"], root=tmp_path)
    py_compile.compile(str(file), doraise=True)
    cached = file.stat()
    file.write_text("value = 2\n")
    os.utime(file, ns=(cached.st_atime_ns, cached.st_mtime_ns))  # now Python takes the cache for fresh

    second = PluginSet.load({}, ["./plug.py"], root=tmp_path)

    assert (first.plugins[0].module.value, second.plugins[0].module.value) == (1, 2)
    assert first.versions() != second.versions()


def test_a_name_that_a_file_and_a_distribution_offer_is_an_error_until_one_is_picked(install, tmp_path):
    install("acme", {"rewards": {"same": "mod_acme"}}, {"mod_acme": reward_module("same")})
    (tmp_path / "plug.py").write_text("\n".join(line[4:] for line in reward_module("same").splitlines()))

    (message,) = problems_of({"rewards": {"same"}}, ["plug.py"], root=tmp_path)
    picked = PluginSet.load({"rewards": {"plug.py:same"}}, ["plug.py"], root=tmp_path)

    assert message.startswith("Reward 'same' is offered by acme 1.0 and by plug.py sha256:")
    assert message.endswith("Write 'acme:same' or 'plug.py:same'.")
    assert picked.resolve("rewards", "plug.py:same").__module__.startswith("engine_file_plugin_plug_")
    other = PluginSet.load({"rewards": {"acme:same"}}, ["plug.py"], root=tmp_path)
    assert other.resolve("rewards", "acme:same").__module__ == "mod_acme"


def test_a_misspelt_name_of_a_files_table_shows_the_right_one(tmp_path):
    (tmp_path / "plug.py").write_text("\n".join(line[4:] for line in reward_module("seven").splitlines()))

    (message,) = problems_of({"rewards": {"sevn"}}, ["plug.py"], root=tmp_path)

    assert message.startswith("Unknown reward 'sevn'. Did you mean 'seven'? Known: ")


def test_a_file_outside_the_run_files_folder_needs_permission(tmp_path):
    (tmp_path / "outside.py").write_text("value = 1\n")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link.py").symlink_to(tmp_path / "outside.py")

    for entry in ("../outside.py", "link.py", str(tmp_path / "outside.py")):
        (message,) = problems_of({}, [entry], root=folder)
        assert message == (
            f"Plugin file '{entry}' lies outside the run file's folder ({folder}), and its code would run with your rights. "
            "Move it there, or allow it with --allow-code (allow_code=True)."
        )
    allowed = PluginSet.load({}, ["../outside.py"], root=folder, allow_code=True)

    assert allowed.plugins[0].module.value == 1


def test_an_absent_file_shows_the_nearest_one(tmp_path):
    (tmp_path / "my_plugin.py").touch()

    assert problems_of({}, ["my_plugn.py"], root=tmp_path) == [
        f"Plugin file 'my_plugn.py' is absent: there is no file {tmp_path}/my_plugn.py. Did you mean 'my_plugin.py'?"
    ]


def test_a_broken_file_names_its_line(tmp_path):
    (tmp_path / "plug.py").write_text("x = 1\ny = x / 0\n")

    for _ in range(2):  # nothing half-made is left for the second attempt
        assert problems_of({}, ["plug.py"], root=tmp_path) == [
            "Plugin file 'plug.py' is broken, it does not import: ZeroDivisionError: division by zero "
            f"({tmp_path}/plug.py:2: y = x / 0)"
        ]
