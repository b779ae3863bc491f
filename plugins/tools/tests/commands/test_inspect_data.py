"""inspect data."""

from __future__ import annotations

import json


def test_rows_are_shown_with_what_is_learned_between_brackets(engine, sft_run):
    answer = engine("inspect", "data", "run.toml", "--limit", "1")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "--- row 0, rows.jsonl:1: 6 tokens, 2 learned",
        "0+0=⟦0<eos>⟧",
        "16 of 16 rows prepared: 16 usable, 0 skipped, 6 to 9 tokens, mean 7.4",  # 5 x 6, 5 x 7, 6 x 9
    ]
    assert not (sft_run.parent / "runs").exists()


def test_one_row_is_shown_as_json(engine, sft_run):
    found = json.loads(engine("inspect", "data", "run.toml", "--row", "3", "--json").out)
    [row] = found["rows"]
    [sequence] = row["sequences"]
    assert (row["row"], row["where"]) == (3, "rows.jsonl:4")
    assert sequence["text"] == "3+3=6<eos>"
    assert sequence["loss_mask"] == [False] * 4 + [True] * 2
    assert (sequence["tokens"], sequence["learned"], found["total"]) == (6, 2, 16)


def test_rows_that_are_skipped_are_named_with_the_reason(engine, sft_run):
    rows = [{"prompt": "a"}, {"prompt": "1+1=", "response": "2"}, {"prompt": "1" * 60, "response": "2" * 9}]
    (sft_run.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = engine("inspect", "data", "run.toml", "--set", "sft.max_tokens=40").out.splitlines()
    assert lines[0].startswith("--- row 1, rows.jsonl:2: 6 tokens")
    assert lines[2].startswith("skipped row 0 (bad_rows): rows.jsonl:1: no column 'response'")
    assert lines[3].startswith("skipped row 2 (over_long): rows.jsonl:3: ")
    assert lines[4].startswith("3 of 3 rows prepared: 1 usable, 2 skipped, 6 to 6 tokens")


def test_prompts_are_shown_with_the_columns_that_rewards_receive(engine, rl_run):
    lines = engine("inspect", "data", "rl.toml", "--limit", "1", "--check", "2").out.splitlines()
    assert lines[0] == "--- row 0, rows.jsonl:1: 4 tokens"
    assert lines[1:3] == ["0+0=", "columns: response = '0'"]
    assert lines[3].startswith("2 of 16 rows prepared")


def test_a_row_that_does_not_exist_is_refused(engine, sft_run):
    answer = engine("inspect", "data", "run.toml", "--row", "16")
    assert answer.code == 2
    assert answer.err == "engine: --row 16: the data has 16 rows, 0 to 15.\n"
