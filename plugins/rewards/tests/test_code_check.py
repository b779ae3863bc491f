"""The checks of the reward ``code`` before a run begins."""

import pytest

from engine_core.cli.main import main
from engine_plugin_rewards.code import make_check
from engine_plugin_rewards.sandbox import tiers

RUN = """
[model]
path = "{folder}"
[data]
train = "rows.jsonl"
[[reward]]
name = "code"
[reward.code]
{options}
"""


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    """Return ``validate('block = "first"')``: exit code and message of ``engine validate``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')

    def run(options):
        (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path, options=options))
        code = main(["validate", "run.toml"])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("total_timeout_seconds = 9.5", 2, "more than nine tenths of timeout_seconds = 10"),
        (
            'readable = ["{folder}/rows.json"]',
            2,
            "rows.json' does not exist on this machine.\n",
        ),
        ('readable = ["/no/such"]', 2, "readable: '/no/such' does not exist on this machine.\n"),
        ('readable = ["rows"]', 2, "'rows' must be absolute"),
        ('readable = ["/"]', 2, "readable: '/' is what no program may see"),
        ('readable = ["/proc/self"]', 2, "'/proc/self' is /proc/"),
        ('readable = ["/usr/../sys"]', 2, "is /sys: what processes, devices"),
        ('min_isolation = "docker"', 2, "'limits', 'landlock' or 'namespaces'"),
    ],
)
def test_validate_sees_what_cannot_work(validate, tmp_path, options, code, message):
    found, said = validate(options.replace("{folder}", str(tmp_path)))
    assert (found, message in said) == (code, True), said


def test_validate_sees_a_sandbox_that_this_machine_has_not(validate, monkeypatch):
    assert "isolation" not in validate('min_isolation = "limits"')[1]
    limits = (
        "limits",
        {"namespaces": "the kernel refuses", "landlock": "none"},
    )
    monkeypatch.setattr(tiers, "strongest", lambda: limits)
    code, said = validate('min_isolation = "namespaces"')
    assert code == 5
    assert "min_isolation = 'namespaces', but this machine has only 'limits': the kernel refuses." in said


# -- rows ---------------------------------------------------------------------


@pytest.fixture
def check():
    return lambda: make_check(10.0, min_isolation="limits")


def test_rows_with_tests_pass(check):
    look = check()
    look({"tests": ["assert f(1) == 2"]})
    look({"tests": None, "answer": '{"inputs": ["1"], "outputs": ["2"]}'})
    look({"answer": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"})


def test_a_row_without_tests_is_told_with_the_column_and_the_forms(check):
    with pytest.raises(LookupError) as exc:
        check()({"test": "assert f(1) == 2", "prompt": "a"})
    said = str(exc.value)
    assert "no value in a column 'tests' or 'answer'. Did you mean 'test'? Known: prompt, test." in said
    assert '[data.columns]: answer = "...". Forms of tests: {"inputs": [...], "outputs": [...]}' in said
    with pytest.raises(LookupError):
        check()({"tests": None})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": "42"}, "column 'answer': code that asserts nothing: '42'"),
        ({"answer": "twenty apples"}, "column 'answer': invalid syntax"),
        ({"tests": {"a": 1}, "answer": "assert f(1) == 2"}, "column 'tests': a test has the keys a"),
        ({"tests": "import numpy\nassert numpy.sum(f(1)) == 2"}, "column 'tests': they use numpy, which"),
        ({"tests": 7}, r"column 'tests': got 7 \(int\)"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "nothing in the column 'entry_point'"),
    ],
)
def test_a_row_with_tests_of_no_known_form_is_told_with_its_column_and_the_forms(check, columns, message):
    with pytest.raises(ValueError, match=message) as exc:
        check()(columns)
    assert "Forms of tests: {" in str(exc.value)


def test_a_row_whose_test_imports_a_package_passes_where_the_prelude_shows_packages():
    look = make_check(10.0, min_isolation="limits", prelude="import sys\nsys.path.append('/packages')")
    look({"tests": "import numpy\nassert numpy.sum(f(1)) == 2"})
