"""The checks of the reward ``code`` before a run begins."""

import pytest

from engine_core.cli.main import main
from engine_core.errors import ConfigError
from engine_plugin_rewards.code_check import make_check
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
SHELL = """
from engine_core import hookimpl
from engine_plugin_rewards.tables import CodeLanguage
from engine_plugin_rewards.code_languages import Language

def shell():
    return Language(fences={"sh"}, file="main.sh", run=("/bin/sh", "main.sh"), shows=("/bin", "/usr/bin"))

@hookimpl
def engine_code_languages():
    return {"shell": CodeLanguage(load=shell)}
"""


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    """Return ``validate('language = "c"')``: exit code and message of ``engine validate``."""
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
        ('language = "pyton"', 3, "language = 'pyton': Unknown code language 'pyton'. Did you mean 'python'"),
        ("total_timeout_seconds = 9.5", 2, "more than nine tenths of timeout_seconds = 10"),
        (
            'readable = ["{folder}/rows.json"]',
            2,
            "does not exist on this machine. Did you mean 'rows.jsonl'?",
        ),
        ('readable = ["/no/such"]', 2, "readable: '/no/such' does not exist on this machine.\n"),
        ('readable = ["rows"]', 2, "'rows' must be absolute"),
        ('readable = ["/"]', 2, "readable: '/' is what no program may see"),
        ('readable = ["/proc/self"]', 2, "'/proc/self' is /proc/"),
        ('readable = ["/usr/../sys"]', 2, "is /sys: what processes, devices"),
        ('min_isolation = "docker"', 2, "'limits', 'landlock', 'namespaces' or 'bubblewrap'"),
    ],
)
def test_validate_sees_what_cannot_work(validate, tmp_path, options, code, message):
    found, said = validate(options.replace("{folder}", str(tmp_path)))
    assert (found, message in said) == (code, True), said


def test_validate_sees_a_sandbox_that_this_machine_has_not(validate, tmp_path, monkeypatch):
    assert "isolation" not in validate('min_isolation = "limits"')[1]
    monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap
    tiers.look.cache_clear()
    code, said = validate('min_isolation = "bubblewrap"')
    tiers.look.cache_clear()
    assert code == 5
    assert "min_isolation = 'bubblewrap', but this machine has only" in said
    assert "there is no program 'bwrap'" in said


# -- rows ---------------------------------------------------------------------


@pytest.fixture
def check(tmp_path):
    def make(modules=(), **options):
        return make_check(10.0, modules, tmp_path, False, **{"min_isolation": "limits"} | options)

    return make


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
        ({"tests": 7}, r"column 'tests': got 7 \(int\)"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "nothing in the column 'entry_point'"),
    ],
)
def test_a_row_with_tests_of_no_known_form_is_told_with_its_column_and_the_forms(check, columns, message):
    with pytest.raises(ValueError, match=message) as exc:
        check()(columns)
    assert "Forms of tests: {" in str(exc.value)


def test_a_row_with_tests_that_the_language_cannot_have_is_told(check, tmp_path):
    if tiers.TIERS.index(tiers.strongest()[0]) < tiers.TIERS.index("namespaces"):
        pytest.skip("other languages need namespaces")
    (tmp_path / "shell.py").write_text(SHELL)
    look = check(["shell.py"], language="shell")
    look({"tests": {"inputs": ["1"], "outputs": ["2"]}})
    with pytest.raises(ValueError, match="language 'shell' has no tests of kind 'expression'"):
        look({"tests": ["assert f(1) == 2"]})
    with pytest.raises(ConfigError, match="needs files"):
        check(["shell.py"], language="shell", disk_mb=0)
