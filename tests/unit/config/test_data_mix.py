"""``[data] mix`` and ``[data] curriculum``: keys, paths, option tables, and what is refused."""

import json

import jsonschema
import pytest

from engine_core import load_config
from engine_core.config.assemble import check_inputs
from engine_core.config.dump import as_data, check, differences, dump_toml, origins
from engine_core.errors import ConfigError
from engine_plugin_tools.schema import json_schema

RUN = """\
[model]
path = "some/model"
[[reward]]
name = "math"
[data]
"""
MIX = RUN + 'mix = [{ path = "a.jsonl", weight = 0.7 }, { source = "squares", weight = 3 }]\n'


def test_parts_are_files_or_sources_with_weights(config_of):
    config = config_of(MIX + "[data.squares]\ncount = 3\n")

    files, source = config.data.mix
    assert (files.path, files.weight, files.source) == ("a.jsonl", 0.7, "")
    assert (source.path, source.weight, source.source) == ([], 3.0, "squares")
    assert config.data.options["squares"].count == 3


def test_parts_may_stand_below_headers_and_merge_by_name(config_of):
    text = RUN + '[[data.mix]]\nname = "a"\npath = "a.jsonl"\nweight = 1\n'
    text += '[[data.mix]]\nname = "b"\npath = ["b.csv"]\nweight = 1\n'

    assert [part.weight for part in config_of(text, "data.mix.b.weight=2").data.mix] == [1, 2]


def test_a_part_without_a_name_is_known_by_its_number(config_of):
    config = config_of(MIX, "data.mix.1.weight=2")

    assert [part.weight for part in config.data.mix] == [0.7, 2]
    known = {key: origin for key, _, origin in origins(config) if key.startswith("data.mix.")}
    assert known["data.mix.0.path"].endswith("run.toml:6")
    assert known["data.mix.1.weight"] == "--set data.mix.1.weight"
    with pytest.raises(ConfigError, match=r"data\.mix has no entry named '2'\. Known: 0, 1"):
        config_of(MIX, "data.mix.2.weight=2")


def test_a_mix_is_read_back_from_its_dump(config_of, specs):
    config = config_of(MIX + "[data.squares]\ncount = 3\n")

    assert config_of(dump_toml(config)) == config
    jsonschema.validate(as_data(config), json_schema(specs))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('mix = [{ path = "a.jsonl", weight = 0 }, { path = "b.jsonl", weight = 1 }]', "6: data.mix.0.weight: got 0, expected a number above 0."),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl", weight = -2 }]', "6: data.mix.1.weight: got -2, expected a number above 0."),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl" }]', "6: data.mix.1.weight: missing, and it has no default."),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { weight = 1 }]', "6: data.mix.1: names neither of path and source, expected one of them."),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl", source = "squares", weight = 1 }]', "6: data.mix.1: names both of path and source, expected one of them."),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { pth = "b.jsonl", weight = 1 }]', "6: data.mix.1.pth: unknown key. Did you mean 'path'?"),
        ('mix = [{ path = "a.jsonl", weight = 1 }]', "6: data.mix: got one part, expected two or more. Name its files in data.train."),
        (
            'mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl", weight = 1 }]\ntrain = "c.jsonl"',
            "6: data.mix: data.train is set too, and rows come from one key.",
        ),
        (
            'mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl", weight = 1 }]\nsource = "squares"',
            "6: data.mix: data.source is set too, and",
        ),
        (
            'mix = [{ path = "a.jsonl", weight = 1 }, { name = "0", path = "b.jsonl", weight = 1 }]',
            "6: data.mix: '0' is listed 2 times, expected once.",
        ),
        ('mix = [{ name = "a/b", path = "a.jsonl", weight = 1 }, { path = "b.jsonl", weight = 1 }]', "6: data.mix.\"a/b\".name: got 'a/b', expected a text that matches"),
        (
            'mix = [{ name = "x", path = "a.jsonl", weight = 1 }, { name = "x", path = "b.jsonl", weight = 1 }]',
            "6: data.mix: 'x' is listed 2 times, expected once.",
        ),
        (
            'mix = [{ path = "a.jsonl", weight = 1 }, { path = "b.jsonl", weight = 1 }]\ncurriculum = "rising"',
            "7: data.curriculum: got 'rising', which chooses among all rows, so the weights of data.mix have no effect. Remove one.",
        ),
        ('train = "a.jsonl"\ncurriculum = "rising"\n[data.rising]\ncolunm = "x"', "9: data.rising.colunm: unknown key. Did you mean 'column'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(problems_of, lines, problem):
    (found,) = problems_of(RUN + lines + "\n")

    assert found.startswith(problem)


def test_options_of_a_curriculum_stand_in_the_table_of_its_name(config_of, good):
    config = config_of(good + 'curriculum = "rising"\n[data.rising]\ncolumn = "steps"\n')

    assert (config.data.curriculum, config.data.curriculum_options.column) == ("rising", "steps")
    assert config_of(dump_toml(config)) == config
    assert config_of(good).data.curriculum_options is None


def test_another_curriculum_on_resume_is_refused(config_of, good):
    was, now = as_data(config_of(good)), as_data(config_of(good + 'curriculum = "rising"\n'))

    with pytest.raises(ConfigError, match=r"data\.curriculum: .*the position is one of its rounds"):
        check(differences(was, now), force=())


def test_files_of_a_part_may_move_and_weights_stay_on_resume(config_of):
    def of(path, weight):
        parts = f'mix = [{{ path = "{path}", weight = {weight} }}, {{ path = "b.jsonl", weight = 1 }}]'
        return as_data(config_of(RUN + parts + "\n"))

    verdicts = {found.key: found.verdict for found in differences(of("a.jsonl", 1), of("moved.jsonl", 2))}
    assert verdicts == {"data.mix.0.path": "warned", "data.mix.0.weight": "refused"}


# ------------------------------------------------------------------ with installed plugins and files


@pytest.fixture
def run_file(tmp_path):
    def make(lines, **files):
        for name, rows in files.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
        file = tmp_path / "run.toml"
        file.write_text(f'trainer = "sft"\n[data]\n{lines}\n')
        return file

    return make


ROW = {"prompt": "a", "response": "b"}


def test_paths_of_parts_are_relative_to_the_file_that_names_them(run_file, tmp_path, monkeypatch):
    file = run_file(
        'mix = [{ name = "x", path = "a.jsonl", weight = 1 }, { path = ["b.jsonl"], weight = 1 }]',
        a=[ROW],
        b=[ROW],
    )
    monkeypatch.chdir("/")
    config = load_config(file)

    assert [part.path for part in config.data.mix] == [str(tmp_path / "a.jsonl"), [str(tmp_path / "b.jsonl")]]
    assert check_inputs(config) == []


def test_absent_and_empty_files_and_wrong_columns_of_a_part_are_named(run_file, tmp_path):
    file = run_file(
        'mix = [{ path = "train.jsonl", weight = 1 }, { path = ["tran.jsonl", "e.jsonl", "q.jsonl"], weight = 1 }]',
        train=[ROW], e=[], q=[{"question": "a"}],
    )  # fmt: skip
    found = check_inputs(load_config(file))

    assert found == [
        f"{file}:3: data.mix: there is no file '{tmp_path}/tran.jsonl'. Did you mean '{tmp_path}/train.jsonl'?",
        f"{file}:3: data.mix: '{tmp_path}/e.jsonl' is empty (0 bytes). Expected at least one row.",
        f"{tmp_path}/q.jsonl:1: no column 'prompt' or 'messages' or 'conversations'. Known: question. Name it in [data.columns].",
    ]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('train = "a.jsonl"\ncurriculum = "rising"', "4: data.curriculum: Unknown curriculum 'rising'. Did you mean 'risin'?"),
        ('mix = [{ path = "a.jsonl", weight = 1 }, { source = "square", weight = 1 }]', "3: data.mix: Unknown data source 'square'. Did you mean 'squares'?"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(run_file, tmp_path, lines, problem):
    (tmp_path / "own.py").write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import Curriculum, DataSource\n"
        "@hookimpl\ndef engine_curricula():\n    return {'risin': Curriculum(load=lambda rows, round: [0])}\n"
        "@hookimpl\ndef engine_data_sources():\n    return {'squares': DataSource(load=lambda split: [])}\n"
    )
    file = run_file(lines, a=[ROW])
    file.write_text('plugins = ["own.py"]\n' + file.read_text())
    problem = f"{int(problem[0]) + 1}{problem[1:]}"

    with pytest.raises(Exception, match="Unknown") as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{problem}")
