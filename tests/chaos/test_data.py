"""Rows 23, 24 and 26: data, prompts and tokenizers that do not fit."""

import json
import shutil

import pytest
from variants import variants

pytestmark = pytest.mark.chaos

GOOD = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}).encode() for i in range(8)]
BAD_LINES = {  # line, what `engine validate` says, what the run says
    "half a row": (b'{"prompt": "1+', "not valid JSON", "not valid JSON"),
    "no object": (b"[1, 2]", "must be an object", "must be a"),
    "no prompt": (b'{"question": "1+1", "answer": "2"}', "no column 'prompt'", "no column 'prompt'"),
    "a number for a prompt": (b'{"prompt": 3, "answer": "2"}', None, "column 'prompt' must be text"),
    "not UTF-8": (b'{"prompt": "\xff\xfe", "answer": "2"}', "not valid UTF-8 (byte 0xff", "not valid UTF-8"),
    "too long": (b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}', None, "longer than 8,388,608 bytes"),
    "too deep": (
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "nested too deeply",
        "nested too deeply",
    ),
}


@pytest.fixture
def data(tmp_path):
    """Writes ``data.jsonl`` of eight good lines with these in between, after the third; returns its path."""

    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"\n".join([*GOOD[:3], *lines, *GOOD[3:]]) + b"\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    "what", variants(BAD_LINES, ("half a row", "a number for a prompt", "not UTF-8", "too deep"))
)
def test_a_bad_row_is_named_by_file_and_line_counted_and_skipped_or_ends_the_run(
    engine, tiny, data, metrics, what
):
    line, validated, told = BAD_LINES[what]
    changes = {"data.train": data(line), "data.prompts_per_step": 2, "run.steps": 6}
    shown = engine("validate", tiny(changes))
    assert shown.code == (0 if validated is None else 4)
    if validated:
        assert "data.jsonl:4: " in shown.err
        assert validated in shown.err
    if validated is None:  # seen only when the row is read: the run ends there, with the row's place
        run = engine("train", tiny(changes))
        assert run.code == 4, run.err
        assert "data.jsonl:4: " in run.err
        assert "Unusable rows so far: 1; [data] max_bad_rows is 0" in run.err
        assert "Traceback" not in run.err
    run = engine("train", tiny(changes | {"data.max_bad_rows": 1, "run.name": "again"}))
    assert run.code == 0, run.err
    assert "Skipped a row: data.jsonl:4: " in run.err
    assert told in run.err
    lines = (engine.folder / "runs/again/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["data/bad_rows"] >= 1


def test_more_bad_rows_than_allowed_end_the_run_with_the_last_one_named(engine, tiny, data, metrics):
    changes = {"data.train": data(b"{", b"}", b"?"), "data.max_bad_rows": 2, "run.steps": 20}
    assert engine("validate", tiny(changes)).code == 4
    # As if the file had changed after it was looked at: `train` looks too, so its check is told to allow more.
    run = engine("train", tiny(changes | {"data.max_bad_rows": 3}))
    assert run.code == 0, run.err
    assert metrics()[-1]["data/bad_rows"] >= 3


EMPTY = {"empty": b"", "blank lines": b"\n\n\n", "no rows of a CSV": b"prompt,answer\n"}


@pytest.mark.parametrize("what", EMPTY)
def test_a_file_without_rows_is_refused_before_the_run_starts(engine, tiny, tmp_path, what):
    path = tmp_path / ("data.csv" if "CSV" in what else "data.jsonl")
    path.write_bytes(EMPTY[what])
    for command in ("validate", "train"):
        run = engine(command, tiny({"data.train": str(path)}))
        assert run.code == 4
        assert str(path) in run.err
        assert "no rows" in run.err or "empty" in run.err
    assert not (engine.folder / "runs").exists()


LONG = json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"}).encode()


def test_an_over_long_prompt_is_an_error_or_skipped_as_the_file_says(engine, tiny, data, metrics):
    changes = {"data.train": data(LONG), "data.max_prompt_tokens": 20, "run.steps": 4, "data.shuffle": False}
    error = engine("train", tiny(changes | {"data.over_long": "error", "run.name": "error"}))
    assert error.code == 4
    assert "data.jsonl:4: " in error.err
    assert "[data] max_prompt_tokens is 20" in error.err
    skip = engine("train", tiny(changes | {"data.over_long": "skip"}))
    assert skip.code == 0
    assert "Skipped a row: data.jsonl:4: " in skip.err
    assert metrics()[-1]["data/over_long"] >= 1


@pytest.fixture
def other_model(tiny_world, tmp_path):
    """A copy of the model's folder to spoil; returns it."""
    shutil.copytree(tiny_world / "model", tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused_with_the_ids(
    engine, tiny, other_model
):
    edit(other_model / "config.json", vocab_size=200)
    run = engine("train", tiny({"model.path": str(other_model)}))
    assert run.code == 4
    assert "The tokenizer has ids up to 257, but the model embeds ids 0 to 199" in run.err
    assert "random weights" not in run.err
    assert "Traceback" not in run.err


def test_a_special_id_outside_the_vocabulary_and_a_missing_end_are_refused(engine, tiny, other_model):
    edit(other_model / "config.json", pad_token_id=None, bos_token_id=999)
    run = engine("train", tiny({"model.path": str(other_model)}))
    assert run.code in (2, 4), run.err
    assert "999" in run.err
    edit(other_model / "config.json", bos_token_id=None)
    edit(other_model / "tokenizer_config.json", eos_token=None)
    run = engine("train", tiny({"model.path": str(other_model), "run.name": "again"}))
    assert run.code == 4, run.err
    assert "no end-of-sequence token" in run.err


def test_padding_that_is_the_end_is_no_problem_and_a_missing_template_is_told(
    engine, tiny, other_model, tmp_path
):
    edit(other_model / "tokenizer_config.json", pad_token="<eos>")
    run = engine("train", tiny({"model.path": str(other_model)}))
    assert run.code == 0, run.err
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}) + "\n")
    run = engine("train", tiny({"data.train": str(chat), "run.name": "chat"}))
    assert run.code in (2, 4), run.err
    assert "chat template" in run.err
    assert "Traceback" not in run.err


def test_another_tokenizer_on_resume_is_refused_unless_it_is_forced(engine, tiny, other_model):
    assert engine("train", tiny({"model.path": str(other_model), "run.steps": 2})).code == 0
    edit(other_model / "tokenizer_config.json", chat_template="{{ messages[0].content }}<eos>")
    (other_model / "chat_template.jinja").write_text("{{ messages[0].content }}<eos>")
    refused = engine("resume", "r", "--steps", 3)
    assert refused.code == 2, refused.err
    assert "model.tokenizer: the tokenizer is not the one of step_00000002" in refused.err
    assert engine("resume", "r", "--steps", 3, "--force", "model.tokenizer").code == 0
