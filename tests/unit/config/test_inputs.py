import pytest

from engine_core.config import inputs
from engine_core.config.inputs import data_problems, model_problems
from engine_core.config.models import DataConfig, EngineConfig
from engine_core.config.roles import ModelConfig


@pytest.fixture
def problems(tmp_path):
    """File name, content and keys of [data] -> problems, the folder's name left out."""

    def find(name, content, **data):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        found = data_problems(DataConfig(train=str(tmp_path / name), **data))
        return [" ".join(problem).strip().replace(f"{tmp_path}/", "") for problem in found]

    return find


@pytest.mark.parametrize(
    ("name", "content", "data"),
    [
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n\n{"prompt": "y"}\n', {}),
        ("a.jsonl", '{"messages": []}\n', {}),
        ("a.jsonl", '{"conversations": []}\n', {"format": "sharegpt"}),
        ("a.jsonl", '{"question": "x"}\r\n', {"columns": {"prompt": "question"}}),
        ("a.jsonl", b'\xef\xbb\xbf{"prompt": "x"}', {}),
        ("a.json", '[{"prompt": "x"}]', {}),
        ("a.csv", 'prompt,answer\n"a\nb",2\n', {}),
        ("a.csv", f"prompt,answer\n{'x ' * 100_000},2\n", {}),
        ("a.parquet", b"PAR1....PAR1", {}),
    ],
)
def test_good_files_have_no_problems(problems, name, content, data):
    assert problems(name, content, **data) == []


@pytest.mark.parametrize(
    ("name", "content", "data", "expected"),
    [
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"prompt": \n',
            {},
            ["a.jsonl:2: not valid JSON (Expecting value at column 11)."],
        ),
        ("a.jsonl", "[1, 2]\n", {}, ["a.jsonl:1: a row must be an object of columns, got list."]),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "\xff"}\n',
            {},
            ["a.jsonl:2: not valid UTF-8 (byte 0xff at column 13); save the file as UTF-8."],
        ),
        ("a.jsonl", "[" * 100_000, {}, ["a.jsonl:1: not valid JSON (nested too deeply)."]),
        ("a.jsonl", "\n\n", {}, ["a.jsonl: no rows."]),
        ("a.csv", "prompt,answer\n", {}, ["a.csv: no rows."]),
        ("a.csv", 'prompt,answer\n"x,2\n', {}, ["a.csv: not valid CSV (unexpected end of data)."]),
        ("a.jsonl", "", {}, ["data.train 'a.jsonl' is empty (0 bytes). Expected at least one row."]),
        (
            "a.jsonl",
            '{"promt": "x"}\n',
            {},
            [
                "a.jsonl:1: no column 'prompt' or 'messages' or 'conversations'. Did you mean 'promt'? Known: promt. "
                "Name it in [data.columns]."
            ],
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "awnser": 3}\n',
            {"columns": {"answer": "anwser"}},
            [
                "a.jsonl:1: no column 'anwser', which data.columns.answer names. Did you mean 'awnser'? Known: awnser, prompt."
            ],
        ),
        (
            "a.csv",
            "promt,answer\n1,2\n",
            {"format": "prompt"},
            [
                "a.csv:1: no column 'prompt'. Did you mean 'promt'? Known: answer, promt. Name it in [data.columns]."
            ],
        ),
        (
            "a.parquet",
            b"PAR1....",
            {},
            [
                "data.train 'a.parquet' is no Parquet file (it does not begin and end with PAR1). Was it cut off?"
            ],
        ),
        (
            "a.txt",
            "x",
            {},
            ["data.train 'a.txt' has the ending '.txt'. Expected one of .jsonl, .json, .csv, .parquet."],
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(problems, name, content, data, expected):
    assert problems(name, content, **data) == expected


def test_bad_rows_are_told_when_there_are_more_than_are_allowed(problems):
    bad = '{"prompt": "x"}\n' + "{\n" * 6 + "[]\n"
    assert problems("a.jsonl", bad, max_bad_rows=7) == []
    first, other, more = problems("a.jsonl", bad, max_bad_rows=6)  # one row of each kind
    assert first.startswith("a.jsonl:2: ")
    assert other.startswith("a.jsonl:8: ")
    assert more == "a.jsonl: 5 more rows like these. data.max_bad_rows = N skips up to N of them."


def test_only_the_beginning_of_a_large_file_is_looked_at(problems, monkeypatch):
    monkeypatch.setattr(inputs, "SCAN_BYTES", 33)
    assert problems("a.jsonl", '{"prompt": "x"}\n' * 2 + "{\n" * 9) == []


def test_an_absent_file_has_its_nearest(tmp_path):
    (tmp_path / "train.jsonl").touch()
    (problem,) = data_problems(DataConfig(validation=[str(tmp_path / "trian.jsonl")]))
    assert problem == (
        "data.validation",
        f"there is no file '{tmp_path}/trian.jsonl'. Did you mean '{tmp_path}/train.jsonl'?",
    )


def model(**keys):
    return [f"{key}: {text}" for key, text in model_problems(EngineConfig(model=ModelConfig(**keys)))]


def test_a_hub_name_is_left_to_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert model(path="Qwen/Qwen3-0.6B") == []
    assert model(path="") == []


def test_a_folder_that_is_absent_has_its_nearest(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    (problem,) = model(path="models/tinny")
    assert problem.startswith(
        "model.path: there is no folder 'models/tinny'. Did you mean 'models/tiny'? Expected"
    )
    (problem,) = model(path="./gone/x/y")
    assert problem.startswith(
        "model.path: there is no folder './gone/x/y'. Expected the folder that save_pretrained wrote, or"
    )


def test_a_folder_without_a_model_or_tokenizer_says_what_is_missing(tmp_path):
    assert model(path=str(tmp_path)) == [
        f"model.path: '{tmp_path}' has no config.json. Expected the folder that save_pretrained wrote.",
        f"model.path: '{tmp_path}' has no tokenizer.json or tokenizer_config.json or tokenizer.model or vocab.json. "
        "Expected a tokenizer there, or model.tokenizer set.",
    ]
    (tmp_path / "config.json").write_text("{}")
    assert model(path=str(tmp_path), tokenizer="a/b") == []
    (tmp_path / "tokenizer.json").touch()
    assert model(path=str(tmp_path)) == []
    (problem,) = model(path=str(tmp_path / "config.json"), tokenizer="a/b")
    assert "is a file" in problem


def test_a_folder_in_place_of_a_file_is_called_one(tmp_path):
    (tmp_path / "rows").mkdir()
    found = list(data_problems(DataConfig(train=str(tmp_path / "rows"))))
    assert found == [("data.train", f"'{tmp_path / 'rows'}' is a folder. Expected its files, each by name.")]
