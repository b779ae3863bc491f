"""``engine data`` lists the public data sets and writes them as files that a run file names."""

import tomllib

import datasets
import hub_folders
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_plugin_trainers.data_command import write_parquet
from engine_plugin_trainers.datasets.table import SETS


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def test_without_a_name_all_sets_are_listed_with_license_rows_and_reward(engine):
    shown = engine("data")
    assert shown.code == 0
    header, *lines = shown.out.splitlines()
    assert header.split() == ["name", "license", "train", "validation", "trainers", "reward", "url"]
    assert [line.split()[0] for line in lines] == [*SETS]
    assert lines[0].split() == [
        *("gsm8k", "MIT", "7,473", "1,319", "rl,", "sft", "numeric"),
        "https://huggingface.co/datasets/openai/gsm8k",
    ]


@pytest.mark.parametrize("name", SETS)
def test_the_lines_of_a_set_are_a_part_of_a_run_file(engine, name):
    shown = engine("data", name)
    keys = tomllib.loads(shown.out)
    assert f"# license: {SETS[name].license}\n# revision: {SETS[name].revision}\n" in shown.out
    if SETS[name].train:
        assert keys["data"]["source"] == name
        assert keys["trainer"] in SETS[name].trainers
    else:
        assert keys == {"eval": {"set": [{"name": name, "path": "OUT/validation.parquet"}]}}
    assert ("reward" in keys) == bool(SETS[name].train and SETS[name].reward)


def test_both_splits_are_written_and_named(engine, tmp_path):
    hub_folders.write("gsm8k", tmp_path / "copy")
    shown = engine("data", "gsm8k", "out", "--source", "copy")
    assert shown.code == 0, shown.err
    assert f"# revision: {hub_folders.COMMIT}\n" in shown.out
    assert "# out/train.parquet: 20 rows\n# out/validation.parquet: 20 rows\n" in shown.out
    keys = tomllib.loads(shown.out)
    assert keys["data"] == {
        "train": "out/train.parquet",
        "validation": "out/validation.parquet",
        "chat_template": True,
    }
    assert keys["reward"] == [{"name": "numeric"}]
    first = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    assert first["answer"] == "501"
    assert first["response"] == hub_folders.gsm8k(1)["answer"]


def test_one_split_is_written_alone(engine, tmp_path):
    hub_folders.write("ultrachat", tmp_path / "copy")
    shown = engine("data", "ultrachat", "out", "--source", "copy", "--split", "validation")
    assert shown.code == 0, shown.err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["validation.parquet"]


def test_a_set_for_evaluation_is_written_as_an_evaluation_set(engine, tmp_path):
    hub_folders.write("math500", tmp_path / "copy")
    shown = engine("data", "math500", "out", "--source", "copy")
    assert tomllib.loads(shown.out) == {
        "eval": {"set": [{"name": "math500", "path": "out/validation.parquet"}]}
    }
    assert len(pq.read_table(tmp_path / "out" / "validation.parquet")) == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm9k"], "There is no data set 'gsm9k'. Did you mean 'gsm8k'? Known: aime24,"),
        (["gsm8k", "full"], "'full' exists already, and nothing is overwritten."),
        (["gsm8k", "out", "--source", "absent"], "--source: there is no folder 'absent'."),
        (["math500", "out", "--split", "train"], "--split train: HuggingFaceH4/MATH-500 has no such split."),
    ],
)
def test_a_mistake_ends_with_its_message_and_writes_nothing(engine, tmp_path, words, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    ended = engine("data", *words)
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "out").exists()
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_folder_of_another_set_writes_nothing(engine, tmp_path):
    hub_folders.write("aime25", tmp_path / "copy")
    ended = engine("data", "math500", "out", "--source", "copy")
    assert ended.code == 4
    assert "lacks the columns solution, subject, level, unique_id" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_empty_in_the_first_part_is_text(tmp_path, monkeypatch):
    monkeypatch.setattr("engine_plugin_trainers.data_command.BATCH_ROWS", 2)
    rows = [{"prompt": str(i), "source": None if i < 3 else "web"} for i in range(5)]
    write_parquet(rows, tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.to_pylist() == rows
    assert table.schema.field("source").type == pa.string()
