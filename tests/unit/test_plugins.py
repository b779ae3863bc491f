import logging
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine_core
from engine_core import plugin_metadata
from engine_core.errors import PluginError, TrainingFailed
from engine_core.plugins import (
    ROLLOUT_CAPABILITIES,
    TRAIN_CAPABILITIES,
    PluginProblems,
    PluginSet,
    known_names,
)

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


# ------------------------------------------------------------------ loading what is named


def test_the_cores_own_names_come_through_the_same_door():
    plugins = PluginSet.load({"train_engines": {"torch"}, "advantages": {"grpo"}})

    assert plugins.spec("train_engines", "torch").load == "engine_core.engines.torch_engine:TorchEngine"
    assert plugins.spec("advantages", "grpo").noun == "advantage estimator"
    assert plugins.versions() == {"engine-core-rl": engine_core.__version__}


def test_only_modules_behind_used_names_are_imported(install):
    install("a-one", {"rewards": {"one": "mod_one"}}, {"mod_one": reward_module("one")})
    install("a-two", {"rewards": {"two": "mod_two"}}, {"mod_two": reward_module("two")})

    plugins = PluginSet.load({"rewards": {"one"}})

    assert plugins.resolve("rewards", "one")(["x", "y"]) == [1.0, 1.0]
    assert "mod_two" not in sys.modules
    assert plugins.versions()["a-one"] == "1.0"
    assert "a-two" not in plugins.versions()


def test_what_a_run_does_not_use_cannot_hurt_it(install):
    install("broken", {"rewards": {"bad": "mod_bad"}}, {"mod_bad": "raise RuntimeError('boom')"})
    install("gone", {"rewards": {"absent": "mod_absent"}})
    install("old", {"rewards": {"old": "mod_old"}}, requires=["engine-core-rl<0.0.1"])
    install("odd", {"rewards": {"odd": "mod odd"}, "nonsense": {"x": "y"}}, requires=["not a requirement!!"])
    install("twin", {"losses": {"ppo_clip": "mod_twin"}})
    install("fine", {"rewards": {"fine": "mod_fine"}}, {"mod_fine": reward_module("fine")})

    plugins = PluginSet.load({"rewards": {"fine"}, "advantages": {"grpo"}})

    assert plugins.resolve("rewards", "fine")(["x"]) == [1.0]


def test_names_that_share_a_module_register_it_once(install):
    install(
        "many",
        {"rewards": {"a": "mod_many", "b": "mod_many"}, "plugins": {"many": "mod_many"}},
        {"mod_many": reward_module("a", "b")},
    )

    plugins = PluginSet.load({"rewards": {"a", "b"}}, ["many"])

    assert [plugin.module.__name__ for plugin in plugins.plugins] == ["mod_many"]


def test_a_name_that_the_run_does_not_use_is_not_loaded(install):
    plugins = PluginSet.load({"advantages": {"grpo"}})

    with pytest.raises(
        PluginError, match="Train engine 'torch' is not loaded: the run file does not name it"
    ):
        plugins.spec("train_engines", "torch")


def test_all_problems_are_told_at_once(install):
    install("broken", {"rewards": {"bad": "mod_bad"}}, {"mod_bad": "raise RuntimeError('boom')"})

    with pytest.raises(PluginProblems) as caught:
        PluginSet.load({"rewards": {"bad", "grpoo"}, "advantages": {"grpoo"}}, ["nowhere.py"])

    assert [(kind, name) for kind, name, _ in caught.value.problems] == [
        ("plugins", "nowhere.py"),
        ("rewards", "bad"),
        ("rewards", "grpoo"),
        ("advantages", "grpoo"),
    ]
    assert len(str(caught.value).splitlines()) == 4
    assert caught.value.exit_code == 3


# ------------------------------------------------------------------ names


@pytest.fixture
def without_our_plugins(monkeypatch):
    """Whatever is installed where the tests run: as if only the core were."""
    everything = plugin_metadata.installed
    monkeypatch.setattr(
        plugin_metadata,
        "installed",
        lambda: tuple(o for o in everything() if not o.distribution.name.startswith("engine-plugin-")),
    )


def test_an_unknown_name_shows_the_nearest_known_one():
    (message,) = problems_of({"advantages": {"grp"}})

    assert message.startswith("Unknown advantage estimator 'grp'. Did you mean 'grpo'? Known: ")


def test_a_plugin_of_ours_that_is_absent_comes_with_its_install_command(without_our_plugins):
    assert problems_of({"train_engines": {"megatron"}}) == [
        "Train engine 'megatron' is not installed. Try: pip install engine-plugin-megatron"
    ]


def test_a_misspelt_name_of_ours_that_is_absent_comes_with_the_right_spelling(without_our_plugins):
    (message,) = problems_of({"train_engines": {"megatrn"}})

    assert message.startswith("Unknown train engine 'megatrn'. Did you mean 'megatron'? Known: ")
    assert message.endswith("It is not installed: pip install engine-plugin-megatron")


def test_nobody_elses_package_is_ever_proposed():
    (message,) = problems_of({"train_engines": {"zzz_backend"}})

    assert message.startswith("Unknown train engine 'zzz_backend'. Known: ")
    assert "pip install" not in message


def test_a_name_of_another_kind_is_said_to_be_so(without_our_plugins):
    (message,) = problems_of({"train_engines": {"vllm"}})

    assert message.startswith("'vllm' is a rollout engine, not a train engine. Known: ")


def test_a_backend_among_the_plugins_is_said_to_be_one():
    (message,) = problems_of({}, ["torch"])

    assert message.startswith("'torch' is a train engine, not a plugin. Known: ")


def test_a_name_that_two_distributions_offer_is_an_error_that_names_both(install):
    install("acme", {"rewards": {"same": "mod_acme"}}, {"mod_acme": reward_module("same")})
    install("zeta", {"rewards": {"same": "mod_zeta"}}, {"mod_zeta": reward_module("same")}, version="2.1")

    assert problems_of({"rewards": {"same"}}) == [
        "Reward 'same' is offered by acme 1.0 and by zeta 2.1. Write 'acme:same' or 'zeta:same'."
    ]
    assert "mod_acme" not in sys.modules


def test_a_distribution_and_a_name_pick_one(install):
    install("acme", {"rewards": {"same": "mod_acme"}}, {"mod_acme": reward_module("same")})
    install("Zeta_Two", {"rewards": {"same": "mod_zeta"}}, {"mod_zeta": reward_module("same")})

    plugins = PluginSet.load({"rewards": {"zeta-two:same"}})

    assert plugins.resolve("rewards", "zeta-two:same").__module__ == "mod_zeta"
    assert "mod_acme" not in sys.modules


def test_a_distribution_that_does_not_offer_the_name_is_told_who_does(install):
    assert problems_of({"advantages": {"acme:grpo"}}) == [
        "Distribution 'acme' offers no advantage estimator 'grpo'. Write 'engine-core-rl:grpo'."
    ]


def test_known_names_come_with_their_distributions(install):
    install("acme", {"losses": {"ppo_clip": "mod_acme", "mine": "mod_acme"}})

    losses = known_names("losses")

    assert losses["mine"] == ["acme"]
    assert sorted(losses["ppo_clip"]) == ["acme", "engine-core-rl"]


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


def test_a_broken_module_behind_two_names_is_told_once(install):
    install(
        "broken", {"rewards": {"a": "mod_bad", "b": "mod_bad"}}, {"mod_bad": "raise RuntimeError('boom')"}
    )

    assert len(problems_of({"rewards": {"a", "b"}})) == 1


def test_a_plugin_made_for_an_older_core_is_named_as_the_side_to_upgrade(install):
    install(
        "old",
        {"rewards": {"old": "mod_old"}},
        {"mod_old": "raise RuntimeError"},
        requires=["engine-core-rl<0.1,>=0.0.3"],
    )

    assert problems_of({"rewards": {"old"}}) == [
        f"Plugin 'old' (old 1.0) needs engine-core-rl<0.1,>=0.0.3, but this is engine-core-rl {engine_core.__version__}. "
        "Upgrade old: pip install --upgrade old"
    ]
    assert "mod_old" not in sys.modules


def test_a_plugin_made_for_a_newer_core_asks_to_upgrade_the_core(install):
    install("new", {"rewards": {"new": "mod_new"}}, requires=["torch", "Engine.Core_RL >=7.2, <8"])

    assert problems_of({"rewards": {"new"}}) == [
        f"Plugin 'new' (new 1.0) needs engine-core-rl<8,>=7.2, but this is engine-core-rl {engine_core.__version__}. "
        "Upgrade engine-core-rl: pip install --upgrade engine-core-rl"
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
        "Known: module, options, role."
    ]


def test_an_argument_with_a_default_would_never_be_passed(install):
    source = (
        reward_module("default")
        + "\n    @hookimpl\n    def engine_wrap_policy(module, role='actor'):\n        return []\n"
    )
    install("default", {"rewards": {"default": "mod_default"}}, {"mod_default": source})

    assert problems_of({"rewards": {"default"}}) == [
        "Plugin 'default' (default 1.0): argument 'role' of hook 'engine_wrap_policy' has a default, so it would never "
        "be passed. Remove the default."
    ]


def test_a_hook_without_its_marker_is_an_error(install):
    source = reward_module("plain") + "\n    def engine_on_event(event):\n        pass\n"
    install("plain", {"rewards": {"plain": "mod_plain"}}, {"mod_plain": source})

    assert problems_of({"rewards": {"plain"}}) == [
        "Plugin 'plain' (plain 1.0): 'engine_on_event' is not marked, so it would never be called. Write @hookimpl above it."
    ]


def test_an_optional_hook_of_another_core_version_is_let_in(install):
    source = (
        reward_module("later")
        + "\n    @hookimpl(optionalhook=True)\n    def engine_of_tomorrow(x):\n        pass\n"
    )
    install("later", {"rewards": {"later": "mod_later"}}, {"mod_later": source})

    assert PluginSet.load({"rewards": {"later"}}).versions()["later"] == "1.0"


# ------------------------------------------------------------------ tables


def test_a_promised_name_must_be_in_the_table(install):
    install("liar", {"rewards": {"a": "mod_liar", "b": "mod_liar"}}, {"mod_liar": reward_module("a", "c")})

    assert problems_of({"rewards": {"a"}}) == [
        "Plugin 'a' (liar 1.0) promises the reward 'b' in its metadata, but engine_rewards of 'mod_liar' gives a, c. "
        "The entry point and the table must agree."
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("None", "engine_rewards must return {name: Reward(...)}, got None (NoneType)."),
        ("['x']", "engine_rewards must return {name: Reward(...)}, got ['x'] (list)."),
        ("{1: Reward(load=score)}", "engine_rewards must return {name: Reward(...)}, got the name 1 (int)."),
        ("{'x': 5}", "engine_rewards must return {name: Reward(...)}, but 'x' is 5 (int)."),
        ("{'x': Loss(load=score)}", "engine_rewards must return {name: Reward(...)}, but 'x' is Loss("),
        (
            "{'x': Reward(load='mod')}",
            "'load' of 'x' must be 'module:attribute' or the object itself, got 'mod' (str).",
        ),
        (
            "{'x': Reward(load=score, config=dict)}",
            "'config' of 'x' must be a pydantic model class, got <class 'dict'>",
        ),
    ],
)
def test_a_table_of_something_else_is_an_error(install, answer, message):
    source = REWARD.replace("{NAMES: Reward(load=score)}", answer).replace(
        "import Reward", "import Loss, Reward"
    )
    install("odd", {"rewards": {"x": "mod_odd"}}, {"mod_odd": source})

    (problem,) = problems_of({"rewards": {"x"}})

    assert problem.startswith("Plugin 'x' (odd 1.0): ")
    assert message in problem


def test_a_table_hook_that_raises_carries_name_version_and_line(install):
    source = REWARD.replace("return {NAMES: Reward(load=score)}", "raise ValueError('no luck')")
    site = install("raises", {"rewards": {"x": "mod_raises"}}, {"mod_raises": source}, version="3.2")

    assert problems_of({"rewards": {"x"}}) == [
        "Plugin 'x' (raises 3.2) failed in engine_rewards (while it was loaded): ValueError: no luck "
        f"({site}/mod_raises.py:10: raise ValueError('no luck'))"
    ]


def test_a_load_that_names_nothing_shows_the_nearest_name(install):
    source = REWARD.replace("{NAMES: Reward(load=score)}", "{'x': Reward(load='mod_lost:scor')}")
    install("lost", {"rewards": {"x": "mod_lost"}}, {"mod_lost": source})

    with pytest.raises(
        PluginError, match=r"Plugin 'x' \(lost 1.0\): 'mod_lost:scor' has no 'scor'. Did you mean 'score'"
    ):
        PluginSet.load({"rewards": {"x"}}).resolve("rewards", "x")


def test_what_stands_behind_a_name_may_be_broken_too(install):
    source = REWARD.replace("{NAMES: Reward(load=score)}", "{'x': Reward(load='lazy.heavy:score')}")
    install(
        "lazy", {"rewards": {"x": "lazy.plugin"}}, {"lazy.plugin": source, "lazy.heavy": "import not_there\n"}
    )

    plugins = PluginSet.load({"rewards": {"x"}})

    with pytest.raises(
        PluginError,
        match=r"Plugin 'x' \(lazy 1.0\) is broken, it does not import: .*heavy.py:1: import not_there",
    ):
        plugins.resolve("rewards", "x")


# ------------------------------------------------------------------ engines and capabilities

ENGINE = """
    from engine_core import hookimpl
    from engine_core.engines.base import BASE
    from engine_core.specs import SPEC

    class Whole(BASE):
        BODY

    for name in BASE.__abstractmethods__:
        setattr(Whole, name, lambda self: None)
    Whole.__abstractmethods__ = frozenset()

    class Partial(BASE):
        pass

    class Stranger:
        pass

    @hookimpl
    def engine_KIND():
        return {"mine": SPEC(load=CLASS, capabilities=frozenset(CAPABILITIES))}
"""


def resolve_engine(install, kind="train_engines", body="pass", cls="Whole", capabilities=()):
    base, spec = {
        "train_engines": ("TrainEngine", "TrainBackend"),
        "rollout_engines": ("RolloutEngine", "RolloutBackend"),
    }[kind]
    source = ENGINE.replace("BASE", base).replace("SPEC", spec).replace("BODY", body).replace("KIND", kind)
    source = source.replace("CLASS", cls).replace("CAPABILITIES", repr(list(capabilities)))
    install("mine", {kind: {"mine": "mod_mine"}}, {"mod_mine": source})
    return PluginSet.load({kind: {"mine"}}).resolve(kind, "mine")


def test_a_capability_that_the_class_inherits_from_the_base_is_an_error(install):
    with pytest.raises(PluginError) as caught:
        resolve_engine(install, capabilities=["generation_module"])

    assert str(caught.value) == (
        "Plugin 'mine' (mine 1.0) declares the capability 'generation_module', but Whole does not implement "
        "'generation_module'. Implement it, or leave the capability out."
    )


def test_a_capability_that_the_class_implements_is_let_in(install):
    engine = resolve_engine(
        install,
        "rollout_engines",
        "def share_module(self, engine): return None",
        capabilities=["share_module"],
    )

    assert engine.__name__ == "Whole"


def test_an_unknown_capability_shows_the_nearest_known_one(install):
    with pytest.raises(PluginError) as caught:
        resolve_engine(install, "rollout_engines", capabilities=["share_modul"])

    assert str(caught.value) == (
        "Plugin 'mine' (mine 1.0): unknown capability 'share_modul' of a rollout engine. Did you mean 'share_module'? "
        "Known: pause, share_module, sleep."
    )


def test_an_engine_that_lacks_a_part_of_the_contract_is_an_error(install):
    with pytest.raises(
        PluginError, match=r"Partial does not implement _build_model_optimizer, export, .* of TrainEngine"
    ):
        resolve_engine(install, cls="Partial")


def test_a_class_that_is_no_engine_is_an_error(install):
    with pytest.raises(
        PluginError, match=r"Stranger.* is not a subclass of engine_core.engines.base.TrainEngine"
    ):
        resolve_engine(install, cls="Stranger")


def test_every_capability_is_a_method_that_the_contract_leaves_open():
    from engine_core.engines.base import RolloutEngine, TrainEngine

    for contract, capabilities in ((TrainEngine, TRAIN_CAPABILITIES), (RolloutEngine, ROLLOUT_CAPABILITIES)):
        for method in capabilities.values():
            assert hasattr(contract, method)
            assert method not in contract.__abstractmethods__


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


# ------------------------------------------------------------------ step hooks, role by role

STEP = """
    from engine_core import hookimpl
    from engine_core.specs import TrainBackend

    @hookimpl
    def engine_wrap_policy(role, module):
        return ANSWER

    @hookimpl
    def engine_train_engines():
        return {"NAME": TrainBackend(load="x:y")}
"""


def backend(install, name: str, answer: str | None) -> None:
    source = STEP.replace("ANSWER", repr(answer)).replace("NAME", name)
    install(f"dist-{name}", {"train_engines": {name: f"mod_{name}"}}, {f"mod_{name}": source})


def named(install, name: str, answer: str | None) -> None:
    source = STEP.replace("ANSWER", repr(answer)).split("@hookimpl\n    def engine_train")[0]
    install(f"dist-{name}", {"plugins": {name: f"mod_{name}"}}, {f"mod_{name}": source})


def wrap(plugins: PluginSet, *, backend: str | None):
    relay = plugins.step("actor", ("train_engines", backend) if backend else None)
    return relay.engine_wrap_policy(role="actor", module=None, options=None)


def test_each_role_is_answered_by_its_own_backends_plugin(install):
    backend(install, "sharder", "from sharder")
    backend(install, "other", "from other")
    plugins = PluginSet.load({"train_engines": {"sharder", "other", "torch"}})

    assert wrap(plugins, backend="sharder") == "from sharder"
    assert wrap(plugins, backend="other") == "from other"
    assert wrap(plugins, backend="torch") is None  # the caller's default
    assert wrap(plugins, backend=None) is None


def test_named_plugins_answer_first_and_the_last_named_before_all(install):
    backend(install, "sharder", "from sharder")
    named(install, "early", "from early")
    named(install, "late", "from late")
    named(install, "silent", None)

    one = PluginSet.load({"train_engines": {"sharder"}}, ["early", "late", "silent"])
    other = PluginSet.load({"train_engines": {"sharder"}}, ["late", "early"])
    quiet = PluginSet.load({"train_engines": {"sharder"}}, ["silent"])

    assert wrap(one, backend="sharder") == "from late"
    assert wrap(other, backend="sharder") == "from early"
    assert wrap(quiet, backend="sharder") == "from sharder"


def test_a_step_hook_that_raises_carries_plugin_version_role_and_line(install):
    source = STEP.replace("return ANSWER", "return helper()").replace("NAME", "fails")
    source += "\n    def helper():\n        raise KeyError('layer')\n"
    site = install(
        "dist-fails", {"train_engines": {"fails": "mod_fails"}}, {"mod_fails": source}, version="0.4"
    )
    plugins = PluginSet.load({"train_engines": {"fails"}})

    with pytest.raises(PluginError) as caught:
        wrap(plugins, backend="fails")

    assert str(caught.value) == (
        "Plugin 'fails' (dist-fails 0.4) failed in engine_wrap_policy (actor): KeyError: 'layer' "
        f"({site}/mod_fails.py:14: raise KeyError('layer'))"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_the_engine_keeps_its_kind_and_gains_the_plugins_name(install):
    source = STEP.replace("return ANSWER", "raise TrainingFailed('no')").replace("NAME", "fails")
    source = source.replace(
        "import hookimpl", "import hookimpl\n    from engine_core.errors import TrainingFailed"
    )
    install("dist-fails", {"train_engines": {"fails": "mod_fails"}}, {"mod_fails": source})
    plugins = PluginSet.load({"train_engines": {"fails"}})

    with pytest.raises(TrainingFailed) as caught:
        wrap(plugins, backend="fails")

    assert caught.value.__notes__ == [
        "Plugin 'fails' (dist-fails 1.0) raised this in engine_wrap_policy (actor)."
    ]


# ------------------------------------------------------------------ observers


def test_a_failing_observer_is_logged_and_counted_and_the_others_hear(install, caplog):
    observer = """
        from engine_core import hookimpl
        heard = []

        @hookimpl
        def engine_on_event(event, step, data):
            heard.append((event, step, dict(data)))
            data["spoiled"] = True
    """
    failing = observer.replace("heard.append", "raise OSError('disk full') or ")
    for name, source in (("first", observer), ("failing", failing), ("last", observer)):
        install(f"dist-{name}", {"plugins": {name: f"mod_{name}"}}, {f"mod_{name}": source})
    plugins = PluginSet.load({}, ["first", "failing", "last"])
    data = {"metrics": 1.0}

    plugins.emit("step_finished", 3, data)

    assert plugins.observer_failures == 1
    assert (
        sys.modules["mod_first"].heard
        == sys.modules["mod_last"].heard
        == [("step_finished", 3, {"metrics": 1.0})]
    )
    assert data == {"metrics": 1.0}
    assert "Plugin 'failing' (dist-failing 1.0) failed to observe 'step_finished' of step 3" in caplog.text
    assert "OSError: disk full" in caplog.text


# ------------------------------------------------------------------ speed


def test_loading_and_listing_import_nothing_heavy():
    code = (
        "import sys; from engine_core.plugins import PluginSet, list_plugins; list_plugins();"
        "PluginSet.load({'train_engines': ['torch'], 'losses': ['ppo_clip'], 'trackers': ['wandb'], 'trainers': ['rl']});"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert child.stdout.strip() == "[]"


def test_a_reinstalled_plugin_is_seen_in_the_same_process(install):
    site = install("first", {"rewards": {"one": "mod_one"}})
    assert "one" in known_names("rewards")

    shutil.rmtree(next(Path(site).glob("first-*")))
    install("second", {"rewards": {"two": "mod_two"}})

    assert "one" not in known_names("rewards")
    assert known_names("rewards")["two"] == ["second"]
