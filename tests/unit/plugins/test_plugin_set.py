import subprocess
import sys

import pytest

import engine_core
from engine_core.errors import PluginError, TrainingFailed
from engine_core.plugins.modules import ROLLOUT_CAPABILITIES, TRAIN_CAPABILITIES
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


# ------------------------------------------------------------------ loading what is named


def test_the_cores_own_names_come_through_the_same_door():
    plugins = PluginSet.load({"trainers": {"rl"}, "advantages": {"grpo"}})

    assert plugins.spec("trainers", "rl").load == "engine_core.train.trainer:Trainer"
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
    install("claims", {"advantages": {"mine": "engine_core.builtin"}})
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
    (message,) = problems_of({"train_engines": {"hf"}})

    assert message.startswith("'hf' is known as rollout engine, not as train engine. Known: ")


@pytest.mark.parametrize("name", ["nll", "ref_log_probs", "validate", "episodes", "architectures"])
def test_a_name_that_no_key_can_choose_is_not_said_to_be_something_else(name):
    """Objectives, columns, commands, parts and tables are asked for by code."""
    (message,) = problems_of({"rewards": {name}})

    assert message.startswith(f"Unknown reward '{name}'.")


def test_a_backend_among_the_plugins_is_said_to_be_one():
    (message,) = problems_of({}, ["torch"])

    assert message.startswith("'torch' is known as train engine, not as plugin. Known: ")


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
        ("{'x': 5}", "engine_rewards must return {name: Reward(...)}, but 'x' is 5 (int)."),
        ("{'x': Loss(load=score)}", "engine_rewards must return {name: Reward(...)}, but 'x' is Loss("),
        (
            "{'x': Reward(load=5)}",
            "'load' of 'x' must be 'module:attribute' or the object itself, got 5 (int).",
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
    from engine_core.contracts.engines import BASE
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
        "Known: custom_model, partial, pause, share_module, sleep, support."
    )


def test_an_engine_that_lacks_a_part_of_the_contract_is_an_error(install):
    with pytest.raises(
        PluginError, match=r"Partial does not implement _build_model_optimizer, export, .* of TrainEngine"
    ):
        resolve_engine(install, cls="Partial")


def test_a_class_that_is_no_engine_is_an_error(install):
    with pytest.raises(
        PluginError, match=r"Stranger.* is not a subclass of engine_core.contracts.engines.TrainEngine"
    ):
        resolve_engine(install, cls="Stranger")


def test_a_capability_is_a_method_that_the_contract_leaves_open_or_more_of_one_that_it_asks_for():
    from engine_core.contracts.engines import RolloutEngine, TrainEngine

    for contract, capabilities in ((TrainEngine, TRAIN_CAPABILITIES), (RolloutEngine, ROLLOUT_CAPABILITIES)):
        for capability, method in capabilities.items():
            assert hasattr(contract, method)
            asked_for = capability in ("support", "common_checkpoints", "custom_model", "partial")
            assert (method in contract.__abstractmethods__) == asked_for


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
    relay = plugins.step("actor", *([("train_engines", backend)] if backend else []))
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

    assert caught.value.__notes__ == ["Plugin 'fails' (dist-fails 1.0) failed in engine_wrap_policy (actor)."]


# ------------------------------------------------------------------ observers


@pytest.mark.parametrize("failure", ["OSError('disk full')", "SystemExit(0)"])
def test_a_failing_observer_is_logged_and_counted_and_the_others_hear(install, caplog, failure):
    observer = """
        from engine_core import hookimpl
        heard = []

        @hookimpl
        def engine_on_event(event, step, data):
            heard.append((event, step, dict(data)))
            data["spoiled"] = True
    """
    failing = observer.replace("heard.append", f"raise {failure} or ")
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
    assert failure.partition("(")[0] in caplog.text


# ------------------------------------------------------------------ speed


def test_loading_and_listing_import_nothing_heavy():
    code = (
        "import sys; from engine_plugin_tools.plugin_list import list_plugins; list_plugins();"
        "from engine_core.plugins import PluginSet;"
        "PluginSet.load({'train_engines': ['torch'], 'losses': ['ppo_clip'], 'trackers': ['wandb'], 'trainers': ['rl']});"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert child.stdout.strip() == "[]"


def test_a_function_that_cannot_be_called_with_its_options_is_found_while_loading(tmp_path):
    (tmp_path / "tether.py").write_text(
        "from engine_core import hookimpl\n"
        "from engine_core.specs import Loss\n"
        "def tether(outputs, batch, strength): ...\n"
        "@hookimpl\n"
        "def engine_losses():\n"
        "    return {'tether': Loss(load=tether)}\n"
    )
    with pytest.raises(PluginProblems, match=r"policy loss 'tether' must be callable as f\(outputs, batch\)"):
        PluginSet.load({"losses": {"tether"}}, ["tether.py"], tmp_path)
