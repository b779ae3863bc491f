"""Each sampling option is declared once: everything that reads options takes the list from the declaration."""

import ast
import dataclasses
from pathlib import Path

import pytest

import engine_core
from engine_core.config.evaluation import EvalConfig, EvalSetConfig, HeldOut
from engine_core.config.roles import RolloutConfig
from engine_core.tables import BASE_SAMPLING, DEFAULTS, DISTRIBUTION, Distribution, SamplingOptions
from engine_core.types import Sampling

CORE = Path(engine_core.__file__).parent


def names_in(path):
    """Return what the code of a file names: variables, attributes, arguments, and texts that are a name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for field in ("id", "attr", "arg"):
            yield getattr(node, field, None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.removeprefix("rollout.")


def test_an_option_is_named_by_its_declaration_the_samplers_the_kit_and_protocols_alone():
    """What a new option needs is what ``top_p`` needs; that a file of each sampler reads it is its implementation.

    A published protocol, of evaluation or of requests, names it too.
    """
    roots = [CORE, *CORE.parent.glob("plugins/*/src")]
    files = [path for root in roots for path in root.rglob("*.py")]
    assert len(files) > 300
    naming = {path.relative_to(CORE.parent).as_posix() for path in files if "top_p" in names_in(path)}
    assert naming == {
        "engine_core/tables.py",
        "plugins/agents/src/engine_plugin_agents/chat_completions.py",
        "plugins/hf_rollout/src/engine_plugin_hf_rollout/distribution.py",
        "plugins/testing/src/engine_plugin_testing/rollout_cuts.py",
        "plugins/tools/src/engine_plugin_tools/suites.py",
        "plugins/vllm_rollout/src/engine_plugin_vllm_rollout/requests.py",
    }


def test_the_tables_and_requests_have_the_options_with_their_bounds_and_texts():
    request = {field.name: field.default for field in dataclasses.fields(Sampling)}
    assert {name: request[name] for name in DEFAULTS} == DEFAULTS
    for name, default in DEFAULTS.items():
        field = RolloutConfig.model_fields[name]
        assert (field.default, bool(field.description)) == (default, True)
    for name in DISTRIBUTION:
        fields = [table.model_fields[name] for table in (RolloutConfig, EvalConfig, EvalSetConfig, HeldOut)]
        assert all(field.description for field in fields)
    assert {*DISTRIBUTION, "max_response_tokens"} <= set(EvalSetConfig.model_fields)
    assert EvalConfig().temperature == 0.0
    assert RolloutConfig().temperature == 1.0


def test_a_sampler_implements_every_option_of_today_unless_its_entry_says_otherwise():
    """An option that is added is not in ``BASE_SAMPLING``: each sampler says so itself."""
    assert {"temperature", "top_p", "top_k", "max_response_tokens", "stop", "stop_token_ids"} == BASE_SAMPLING
    assert set(DEFAULTS) >= BASE_SAMPLING


@pytest.mark.parametrize(
    ("options", "cutting", "cuts"),
    [
        (Distribution(), [], False),
        (Distribution(temperature=0.5), [], False),
        (Distribution(top_p=0.9), ["top_p"], True),
        (Sampling(top_p=0.9, top_k=3), ["top_p", "top_k"], True),
        (SamplingOptions(temperature=0.0, top_k=3), ["top_k"], False),
        (RolloutConfig(top_k=3), ["top_k"], True),
    ],
)
def test_a_distribution_is_cut_by_the_options_that_leave_tokens_out(options, cutting, cuts):
    assert (options.cutting, options.cuts) == (cutting, cuts)
