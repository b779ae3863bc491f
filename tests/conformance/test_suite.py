"""The suites as pytest sees them: names, promises, gaps that are declared."""

from pathlib import Path

import pytest

from engine_plugin_testing import RewardSuite, RolloutEngineSuite, TrainEngineSuite
from engine_plugin_testing.contracts import close, identical, near, refused, same_direction

pytest_plugins = ["pytester"]
SUITES = (TrainEngineSuite, RolloutEngineSuite, RewardSuite)
REWARD = """
from engine_plugin_testing import RewardSuite

class TestShort(RewardSuite):
    name = "short"
    plugins = ["short.py"]
    examples = [("a", 1.0), ("abcdef", {value})]
    unsupported = {unsupported}
"""
PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Reward

def short(completion):
    return float(len(completion) < 4)

@hookimpl
def engine_rewards():
    return {"short": Reward(load=short)}
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """``run(value=0.0, unsupported={...})``: the suite of a stranger's reward, in a session of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makepyfile(short=PLUGIN)

    def of(value=0.0, unsupported=None, *arguments):
        pytester.makepyfile(test_short=REWARD.format(value=value, unsupported=unsupported or {}))
        return pytester.runpytest_inprocess(
            "-v", "-rs", "-p", "no:cacheprovider", "test_short.py", *arguments
        )

    return of


def test_a_plugin_that_keeps_its_promises_passes_and_a_gap_is_shown_with_its_reason(run):
    result = run(0.0, {"test_very_long_text_gets_a_value": "it asks a server"})
    result.assert_outcomes(passed=len(RewardSuite.contracts) - 1, skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*unsupported: it asks a server"])


def test_a_broken_promise_is_shown_with_the_numbers_and_without_our_own_frames(run):
    result = run(0.5)
    result.stdout.fnmatch_lines(
        [
            "In a worker process, every example gets its value*",
            "Example 1 ({'completion': 'abcdef'}): sample 0 got 0.0, expected 0.5.",
        ]
    )
    result.stdout.no_fnmatch_line("*launcher.py*")
    assert result.parseoutcomes()["failed"] == 1


@pytest.mark.parametrize(
    ("unsupported", "message"),
    [
        ({"test_values_are_wright": "a slip"}, "names 'test_values_are_wright', which is no test of it. Did you mean 'test_values_are_right'"),
        ({"check": "no test"}, "names 'check', which is no test of it"),
        ({"test_values_are_right": " "}, "must be the reason, as text"),
    ],
)  # fmt: skip
def test_a_gap_must_be_a_test_and_have_a_reason(unsupported, message):
    with pytest.raises(TypeError) as caught:
        type("Mine", (RewardSuite,), {"unsupported": unsupported})
    assert message in str(caught.value)


ABSENT = """
from engine_plugin_testing import RewardSuite, TrainEngineSuite

class TestAbsent({base}):
    {attribute}
"""


@pytest.mark.parametrize(
    ("base", "attribute", "lines"),
    [
        ("RewardSuite", "name = 'nobodys'", ["Unknown reward 'nobodys'.*", "Install the package that offers it (pip install -e .), or give its file: *"]),
        ("TrainEngineSuite", "backend = 'nobodys'", ["Unknown train engine 'nobodys'.*", "Install the package*"]),
        ("RewardSuite", "name = 'python'; options = {'path': 'absent.py', 'allow_local_code': True}", ["reward.python.python.path: there is no file or folder *absent.py'*"]),
        ("TrainEngineSuite", "options = {'devise': 'cpu', 'compute_dtype': 'fp99'}", ["actor.torch.compute_dtype: got 'fp99', expected *", "actor.torch.devise: unknown key. Did you mean 'device'?*"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_short_failure(pytester, base, attribute, lines):
    pytester.makepyfile(test_absent=ABSENT.format(base=base, attribute=attribute))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_absent.py")
    outcomes = result.parseoutcomes()
    assert (outcomes["failed"], outcomes.get("errors", 0)) == (1, 0)
    assert outcomes["skipped"] > 5
    result.stdout.fnmatch_lines(lines)
    result.stdout.no_fnmatch_line("*Error*")


@pytest.mark.parametrize(
    ("attribute", "known"), [("option", "options"), ("example", "examples"), ("tolerence", "tolerance")]
)
def test_a_misspelt_attribute_is_refused_with_the_nearest_name(attribute, known):
    base = TrainEngineSuite if known == "tolerance" else RewardSuite
    with pytest.raises(
        TypeError, match=rf"Mine\.{attribute} is no attribute that this suite reads\. Did you mean '{known}'"
    ):
        type("Mine", (base,), {attribute: 1})


def test_a_function_is_refused_where_its_address_is_expected():
    with pytest.raises(
        TypeError, match=r"Mine\.gradients is a function\. Name it as text, 'FILE\.py:close'\."
    ):
        type("Mine", (TrainEngineSuite,), {"gradients": close})


@pytest.mark.parametrize(
    ("base", "name"), [(TrainEngineSuite, "keys"), (RewardSuite, "roles"), (RolloutEngineSuite, "lora")]
)
def test_an_attribute_of_another_suite_is_refused(base, name):
    with pytest.raises(TypeError, match=rf"Mine\.{name} is no attribute that this suite reads"):
        type("Mine", (base,), {name: {}})


def test_a_suite_may_have_methods_and_private_attributes_of_its_own():
    mine = {"_samples": [1], "option": lambda self: None, "exampl": property(lambda self: 1)}
    assert type("Mine", (RewardSuite,), {**mine, "pytestmark": []})._samples == [1]


GRADIENT = "test_the_gradient_is_that_of_the_global_sum"
FREEZING = """
from engine_plugin_testing import TrainEngineSuite

class TestFreezing(TrainEngineSuite):
    plugins = [{plugin!r}]
    plugin_options = {options}
"""


@pytest.mark.parametrize(
    ("options", "passed", "line"),
    [
        ({"freezing": {"freeze": False}}, 1, "*1 passed*"),
        ({}, 0, "*model.embed_tokens.weight*"),
        ({"freezing": {"freese": False}}, 0, "*plugin.freezing.freese: unknown key. Did you mean 'freeze'?*"),
        ({"frezing": {}}, 0, "`plugin_options` has 'frezing'. Did you mean 'freezing'? Known: freezing."),
    ],
)
def test_a_step_hook_gets_the_plugin_options_of_the_suite(pytester, options, passed, line):
    plugin = pytester.makepyfile(freezing=Path(__file__).with_name("freezing.py").read_text("utf-8")).name
    pytester.makepyfile(test_freezing=FREEZING.format(plugin=plugin, options=options))
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", f"test_freezing.py::TestFreezing::{GRADIENT}"
    )
    result.assert_outcomes(passed=passed, failed=1 - passed)
    result.stdout.fnmatch_lines([line])


def test_a_capability_that_is_not_declared_is_a_skip_and_a_declared_one_is_required():
    made = TrainEngineSuite.contracts["test_set_lr_replaces_the_peak"]
    mine = type("Mine", (TrainEngineSuite,), {})  # the base class stays as it is for other tests
    with pytest.raises(pytest.skip.Exception, match="does not declare the capability 'set_lr'"):
        mine().check(made)
    mine.setup_class()
    try:
        assert made.capability in mine._capabilities
    finally:
        mine.teardown_class()


@pytest.mark.parametrize(
    ("contract", "options"),
    [
        ("log_probs_are_of_what_top_p_and_top_k_left", "'top_k' and 'top_p'"),
        ("a_stop_string_ends_a_response", "'stop'"),
        ("a_stop_token_ends_a_response", "'stop_token_ids'"),
    ],
)
def test_a_contract_of_options_that_the_sampler_does_not_declare_is_a_skip(monkeypatch, contract, options):
    monkeypatch.setattr(RolloutEngineSuite, "_sampling", frozenset({"temperature"}))
    with pytest.raises(pytest.skip.Exception, match=f"lacks {options} in `sampling`"):
        RolloutEngineSuite().check(RolloutEngineSuite.contracts[f"test_{contract}"])


@pytest.mark.parametrize("suite", SUITES)
def test_every_contract_has_a_promise_and_pytest_does_not_collect_the_suites_themselves(suite):
    assert not suite.__name__.startswith("Test")
    for name, made in suite.contracts.items():
        assert made.promise.endswith("."), name
        assert getattr(suite, name).__doc__ == made.promise


def test_comparisons_fail_on_what_is_not_a_number():
    import torch

    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    close(one, one, 0.0, "x")
    same_direction({"a": one}, {"a": one}, 0.0, "x")
    for failing in (
        lambda: close(nan, one, 1.0, "x"),
        lambda: close(one, one + 0.2, 0.1, "x"),
        lambda: close(one, torch.ones(3), 1.0, "x"),
        lambda: near(float("nan"), 1.0, 0.5, "x"),
        lambda: same_direction({"a": nan}, {"a": one}, 0.1, "x"),
        lambda: same_direction({"a": 2 * one}, {"a": one}, 0.1, "x"),
        lambda: same_direction({"b": one}, {"a": one}, 0.1, "x"),
        lambda: identical({"a": one + 1e-7}, {"a": one}, "x"),
        lambda: identical({"a": nan}, {"a": one}, "x", exact=False),
    ):
        with pytest.raises(AssertionError, match=r"^x"):
            failing()


def test_a_refusal_names_what_was_wrong_and_a_crash_is_none():
    with refused("this", "word"):
        raise ValueError("a word")
    with pytest.raises(AssertionError, match="this is not refused"), refused("this"):
        pass
    with pytest.raises(AssertionError, match="not with the words"), refused("this", "word"):
        raise ValueError("nothing")
    crash = r"this ends with KeyError: 'word'\. That is a crash; refuse with one of EngineError, ValueError"
    with pytest.raises(AssertionError, match=crash), refused("this", "word"):
        raise KeyError("word")
