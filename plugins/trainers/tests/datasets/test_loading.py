"""Public data sets are read from copies of their hub repositories."""

import functools
import shutil
import sys

import datasets
import hub_folders
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_core.errors import ConfigError, DataError, EnvironmentProblem
from engine_plugin_trainers.datasets import loading
from engine_plugin_trainers.datasets.table import SETS

LEFT_OUT = {"deepscaler": 1, "ultrafeedback": 1, "hh_rlhf": 2}  # of the training split


@pytest.fixture
def rows_of(copy_of):
    """``rows_of("gsm8k", "train", limit=3)`` from the copy of the set."""

    def read(name, split="train", **options):
        return loading.rows_of(name, split, folder=copy_of(name), **options)

    return read


SPLITS = [(name, split) for name, chosen in SETS.items() for split in chosen.rows]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_every_row_has_the_columns_of_a_layout(rows_of, name, split):
    rows = rows_of(name, split)
    assert len(rows) == hub_folders.ROWS - (LEFT_OUT.get(name, 0) if split == "train" else 0)
    for row in rows:
        if SETS[name].reward:
            assert row["prompt"].endswith(SETS[name].suffix)
            assert row["answer"]
            assert not {"reward_model", "messages", "conversations"} & {*row}  # columns of other layouts
        elif "dpo" in SETS[name].trainers:
            assert row["chosen"][-1]["role"] == row["rejected"][-1]["role"] == "assistant"
            assert row["chosen"] != row["rejected"]
        else:
            assert row["messages"][-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("gsm8k", "train", {"answer": "501", "response": hub_folders.gsm8k(1)["answer"]}),
        ("math", "train", {"answer": "\\frac{1}{2}", "level": "Level 2", "type": "Prealgebra"}),
        (
            "math500",
            "validation",
            {"answer": "441", "unique_id": "test/algebra/21.json", "subject": "Algebra"},
        ),
        ("aime24", "validation", {"answer": "004", "id": 61}),
        ("aime25", "validation", {"answer": "25"}),
        ("dapo_math_17k", "train", {"answer": "6", "extra_info": {"index": "00000000-0001"}}),
        ("deepscaler", "train", {"answer": "\\sqrt{1}"}),
        (
            "openr1_math",
            "train",
            {"answer": "7", "response": hub_folders.openr1(1)["messages"][1]["content"]},
        ),
        ("hh_rlhf", "train", {"chosen": [{"role": "assistant", "content": "2."}]}),
        ("ultrachat", "train", {"messages": hub_folders.ultrachat(1)["messages"]}),
    ],
)
def test_the_first_row_is_converted(rows_of, name, split, expected):
    row = rows_of(name, split)[0]
    assert {column: row.get(column) for column in expected} == expected


def test_a_set_without_held_out_rows_has_none(rows_of):
    assert rows_of("deepscaler", "validation") == []


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25"])
def test_a_set_for_evaluation_has_no_training_rows(rows_of, name):
    said = rf"^{SETS[name].repo} has no training split, .* to train on: gsm8k, math, dapo_math_17k,"
    with pytest.raises(DataError, match=said):
        rows_of(name)


def test_rows_stay_in_the_memory_mapped_file(rows_of):
    rows = rows_of("tulu3_sft", limit=5)
    assert len(rows) == 5
    assert rows.dataset.cache_files
    assert rows[0] is not rows[0]


def test_rows_are_selected_again_when_the_code_that_selects_them_changes(rows_of, monkeypatch):
    before, same = (rows_of("deepscaler").dataset._fingerprint for _ in range(2))
    monkeypatch.setattr(loading.inspect, "getsource", lambda module: "other code")
    assert before == same != rows_of("deepscaler").dataset._fingerprint


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("suffix", "prompt"),
    [
        (None, f"Q {SETS['gsm8k'].suffix}"),
        ("", "Q"),
        ("Think.", "Q Think."),
        ("\nThink.", "Q\nThink."),
    ],
)
def test_the_suffix_follows_each_question(rows_of, suffix, prompt):
    asked = hub_folders.gsm8k(1)["question"]
    assert rows_of("gsm8k", suffix=suffix)[0]["prompt"] == prompt.replace("Q", asked)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_worked_examples_are_the_first_training_rows_which_training_leaves_out(rows_of, split):
    rows = rows_of("gsm8k", split, shots=2, suffix="", limit=3)
    first, second = (hub_folders.gsm8k(i) for i in (1, 2))
    own = hub_folders.gsm8k(3 if split == "train" else 21)
    assert len(rows) == 3
    assert rows[0]["prompt"] == (
        f"Question: {first['question']}\nAnswer: {first['answer']}\n\n"
        f"Question: {second['question']}\nAnswer: {second['answer']}\n\n"
        f"Question: {own['question']}\nAnswer:"
    )
    assert rows[0]["response"] == own["answer"]


@pytest.mark.parametrize(
    ("name", "shots", "has"), [("math500", 1, 0), ("gsm8k", 21, 20), ("dapo_math_17k", 1, 0)]
)
def test_more_worked_examples_than_solutions_are_refused(rows_of, name, shots, has):
    split = "validation" if name == "math500" else "train"
    with pytest.raises(ConfigError, match=rf"^shots: got {shots}, .* has {has} worked solutions"):
        rows_of(name, split, shots=shots)


def test_folder_and_revision_together_are_refused(rows_of):
    with pytest.raises(ConfigError, match=r"^revision: got 'main', but folder names"):
        rows_of("gsm8k", revision="main")


@pytest.mark.parametrize("name", ["ultrafeedback", "hh_rlhf"])
def test_each_pair_is_two_judged_rows(rows_of, name):
    pairs, judged = rows_of(name), rows_of(name, unpaired=True)
    assert len(judged) == 2 * len(pairs)
    for number, pair in enumerate(pairs):
        good, bad = judged[2 * number], judged[2 * number + 1]
        assert good["prompt"] == bad["prompt"] == pair["prompt"]
        assert (good["response"], good["label"]) == (pair["chosen"], True)
        assert (bad["response"], bad["label"]) == (pair["rejected"], False)
    assert not {"chosen", "rejected", "messages"} & {*judged[0]}
    assert judged.digest != pairs.digest


def test_the_commit_of_a_folder_is_the_one_that_the_download_recorded(copy_of, tmp_path, caplog):
    caplog.set_level("INFO", "engine")
    folder = shutil.copytree(copy_of("aime25"), tmp_path / "copy")
    read = functools.partial(loading.rows_of, "aime25", "validation", folder=str(folder))
    read()
    assert (
        f"'aime25' (validation) is read from folder '{folder}', revision {hub_folders.COMMIT}." in caplog.text
    )
    record = folder / ".cache" / "huggingface" / "download" / "README.md.metadata"
    record.write_text("another\n")
    read()
    assert f"folder '{folder}', revision unknown." in caplog.text


# ------------------------------------------------------------------ the digest


def test_the_digest_depends_on_the_rows_and_on_what_is_added_to_them(rows_of):
    made = [
        rows_of("gsm8k"),
        rows_of("gsm8k", limit=19),
        rows_of("gsm8k", suffix=SETS["math"].suffix),
        rows_of("gsm8k", shots=1),
        rows_of("gsm8k", "validation"),
    ]
    assert len({rows.digest for rows in made}) == len(made)
    assert rows_of("gsm8k").digest == made[0].digest


def test_the_digest_is_that_of_the_content_wherever_it_is(copy_of, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BATCH_ROWS", 7)
    before = loading.rows_of("gsm8k", "train", folder=copy_of("gsm8k"))
    folder = shutil.copytree(copy_of("gsm8k"), tmp_path / "gsm8k")
    assert loading.rows_of("gsm8k", "train", folder=str(folder)).digest == before.digest

    file = folder / "main" / "train-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[-1]["answer"] = "#### 1"
    pq.write_table(pa.Table.from_pylist(rows), file)
    changed = loading.rows_of("gsm8k", "train", folder=str(folder))
    assert changed[hub_folders.ROWS - 1]["answer"] == "1"  # not the rows that the library's cache has
    assert changed.digest != before.digest


# ------------------------------------------------------------------ what is refused


def test_a_folder_without_the_split_is_refused(copy_of, tmp_path):
    folder = shutil.copytree(copy_of("ultrachat"), tmp_path / "copy")
    (folder / "README.md").unlink()
    for file in folder.glob("data/train_sft-*"):
        file.unlink()
    said = r"^the split 'train_sft' of folder '.*copy' cannot be read: .*hf download HuggingFaceH4/ultra"
    with pytest.raises(DataError, match=said):
        loading.rows_of("ultrachat", "train", folder=str(folder))


def test_a_folder_with_other_columns_is_refused_with_both_lists(copy_of):
    said = (
        r"^folder '.*aime25' lacks the columns solution, subject, level, unique_id\. "
        r"Expected the columns problem, solution, answer, subject, level, unique_id; found problem, answer, id\."
    )
    with pytest.raises(DataError, match=said):
        loading.rows_of("math500", "validation", folder=copy_of("aime25"))


def test_a_folder_without_data_is_refused(own_cache, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"^the split 'train' of folder .* cannot be read"):
        loading.rows_of("gsm8k", "train", folder=str(tmp_path))


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'engine-plugin-trainers\[datasets\]'"):
        loading.rows_of("gsm8k", "train")


def test_an_unreachable_hub_leads_to_the_option_folder(own_cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    said = (
        r"^the split 'train' of openai/gsm8k on the hub cannot be read: ConnectionError: .* "
        r"name in the option 'folder' \(engine data and engine eval: --source\) a copy that `hf download openai/gsm8k --repo-type dataset --local-dir FOLDER`"
    )
    with pytest.raises(DataError, match=said):
        loading.rows_of("gsm8k", "train")


def test_the_hub_is_asked_for_the_pinned_commit_or_the_revision_of_the_options(own_cache, monkeypatch):
    asked = []

    def refuse(*arguments, **options):
        asked.append((*arguments, options["split"], options["revision"]))
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    for read in (loading.rows_of, functools.partial(loading.rows_of, revision="v2")):
        with pytest.raises(DataError, match="OSError: no network"):
            read("gsm8k", "validation")
    assert asked == [
        ("openai/gsm8k", "main", "test", SETS["gsm8k"].revision),
        ("openai/gsm8k", "main", "test", "v2"),
    ]
