from __future__ import annotations

import json
import logging
from contextlib import closing

import pytest
from chat_templates import save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine_core.config.models import ColumnsConfig, DataConfig
from engine_core.data import PromptSource
from engine_core.data.rows import open_rows
from engine_core.errors import DataError
from engine_plugin_trainers.options import SFTOptions
from engine_plugin_trainers.sft import example_source

ROWS = [{"prompt": f"What is {i} plus 7?", "answer": str(i + 7)} for i in range(10)]


def ids(items) -> list[str]:
    return [item.id for item in items]


def test_a_prompt_carries_its_tokens_text_and_columns(config_of, tokenizer):
    (prompt,) = PromptSource(config_of(ROWS, shuffle=False), tokenizer, seed=0).take(1)
    assert prompt.id == "train:0"
    assert prompt.text == "What is 0 plus 7?"
    assert prompt.token_ids == tokenizer.encode(prompt.text)
    assert prompt.columns == {"answer": "7"}


def test_a_conversation_carries_its_messages(config_of, tokenizer):
    row = {"prompt": [{"role": "user", "content": "hi"}], "answer": "yes"}
    (prompt,) = PromptSource(config_of([row]), tokenizer, seed=0).take(1)
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.columns == {"answer": "yes", "messages": row["prompt"]}


def test_rows_can_have_names_of_their_own(config_of, tokenizer):
    rows = [{"prompt": "a", "name": "first"}, {"prompt": "b", "name": None}]
    config = config_of(rows, columns={"id": "name"}, shuffle=False)
    source = PromptSource(config, tokenizer, seed=0)
    assert ids(source.take(1)) == ["train:first"]
    with pytest.raises(
        DataError, match=r"^train\.jsonl:2: no value in column 'name' \(\[data\.columns\] id\)"
    ):
        source.take(1)


def test_without_shuffle_rows_come_in_the_order_of_the_files(config_of, tokenizer):
    source = PromptSource(config_of(ROWS, shuffle=False), tokenizer, seed=0)
    assert ids(source.take(12)) == [f"train:{i % 10}" for i in range(12)]


def test_each_epoch_is_another_permutation_and_the_seed_decides_it(config_of, tokenizer):
    config = config_of(ROWS)
    first = ids(PromptSource(config, tokenizer, seed=1).take(20))
    assert sorted(first[:10]) == sorted(first[10:]) == sorted(f"train:{i}" for i in range(10))
    assert first[:10] != first[10:]
    assert ids(PromptSource(config, tokenizer, seed=1).take(20)) == first
    assert ids(PromptSource(config, tokenizer, seed=2).take(20)) != first


def test_the_order_is_pinned(config_of, tokenizer):
    # numpy's PCG64 seeded with [seed, epoch]: a change would move every old checkpoint's position.
    order = ids(PromptSource(config_of(ROWS), tokenizer, seed=3).take(10))
    assert [int(name.split(":")[1]) for name in order] == PINNED


PINNED = [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stop_and_resume_gives_the_uninterrupted_sequence(plain_tokenizer, data):
    count = data.draw(st.integers(1, 8), "rows")
    broken = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1), "unusable rows")
    rows = [{"prompt": 5 if i in broken else f"{i}"} for i in range(count)]
    seed = data.draw(st.integers(0, 2**32), "seed")
    takes = data.draw(st.lists(st.integers(0, 7), max_size=6), "takes")
    stop = data.draw(st.integers(0, len(takes)), "resume point")
    config = DataConfig(max_bad_rows=count)
    whole = ids(PromptSource(config, plain_tokenizer, seed, rows=rows).take(sum(takes)))

    source = PromptSource(config, plain_tokenizer, seed, rows=rows)
    taken = [name for n in takes[:stop] for name in ids(source.take(n))]
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(config, plain_tokenizer, seed + 1, rows=rows)
    resumed.take(3)
    resumed.load_state(state)
    assert resumed.state() == state
    taken += [name for n in takes[stop:] for name in ids(resumed.take(n))]

    assert taken == whole
    usable = sorted(f"train:{i}" for i in range(count) if i not in broken)
    for start in range(0, len(taken) - len(usable) + 1, len(usable)):
        assert sorted(taken[start : start + len(usable)]) == usable


def test_workers_change_nothing_but_the_time(config_of, tokenizer):
    rows = [*ROWS[:4], "{broken", {"prompt": "long " * 50}, *ROWS[4:]]
    plain = config_of(rows, max_bad_rows=1, prompts_per_step=4, max_prompt_tokens=40)
    ahead = plain.model_copy(update={"num_workers": 2})
    one, two = (PromptSource(config, tokenizer, seed=5) for config in (plain, ahead))
    try:
        for n in (3, 8, 1):
            assert one.take(n) == two.take(n)
            assert one.state() == two.state()
        assert len(one) == len(two) == 10
        state = one.state()
        expected = one.take(5)
        two.take(2)
        two.load_state(state)
        assert two.take(5) == expected
        assert two.all() == one.all()
        assert two.take(4) == one.take(4)
    finally:
        two.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_know_tools_and_the_ends_of_the_model(config_of, tmp_path, workers):
    """GLM's turns end in the header of the next one, which only the model's generation config says."""
    tokenizer = AutoTokenizer.from_pretrained(save("glm4", tmp_path / "glm4"))
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    config = config_of([{"messages": turns}], num_workers=workers)
    with closing(
        example_source(open_rows(config, "train", None), config, tokenizer, SFTOptions(), seed=0)
    ) as source:
        (example,) = source.take(1)
    learned = [i for i, mask in zip(example.token_ids, example.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "assistant<|user|>assistant"
    tools = [{"type": "function", "function": {"name": "add"}}]
    qwen = AutoTokenizer.from_pretrained(save("qwen2_5", tmp_path / "qwen"))
    with closing(PromptSource(config, qwen, seed=0, tools=tools)) as source:
        (prompt,) = source.take(1)
    assert prompt.columns["tools"] == tools
    assert '{"type": "function", "function": {"name": "add"}}' in prompt.text


def test_tools_of_an_environment_need_the_chat_template(config_of, tmp_path):
    qwen, tools = AutoTokenizer.from_pretrained(save("qwen2_5", tmp_path / "qwen")), [{"name": "add"}]
    rows = [{"prompt": "What is 1 + 1?"}]
    with pytest.raises(
        DataError, match=r"declares tools, but rows of plain text.*chat_template = true in \[data\]"
    ):
        PromptSource(config_of(rows), qwen, seed=0, tools=tools).take(1)
    (prompt,) = PromptSource(config_of(rows, chat_template=True), qwen, seed=0, tools=tools).take(1)
    assert '{"name": "add"}' in prompt.text


def test_tools_of_a_row_stand_before_those_of_the_environment(config_of, tmp_path):
    qwen = AutoTokenizer.from_pretrained(save("qwen2_5", tmp_path / "qwen"))
    rows = [{"prompt": [{"role": "user", "content": "a"}], "tools": [{"name": "own"}]}]
    (prompt,) = PromptSource(config_of(rows), qwen, seed=0, tools=[{"name": "other"}]).take(1)
    assert '{"name": "own"}' in prompt.text
    assert "other" not in prompt.text


def test_control_tokens_of_rows_follow_the_key(config_of, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "a<|im_end|>b"}]}]
    for control, count in (("text", 1), ("allow", 2)):
        (prompt,) = PromptSource(config_of(rows, control_tokens=control), tokenizer, seed=0).take(1)
        assert prompt.token_ids.count(tokenizer.eos_token_id) == count
        assert prompt.text == "<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    (prompt,) = PromptSource(config_of([{"prompt": "a<|im_end|>b"}]), tokenizer, seed=0).take(1)
    assert prompt.token_ids.count(tokenizer.eos_token_id) == 1  # plain text stays as it is


def test_validation_rows_are_all_given_in_order_and_the_position_stays(config_of, tokenizer):
    config = config_of(ROWS)
    config.validation = config.train
    source = PromptSource(config, tokenizer, seed=0, split="validation")
    before = source.state()
    assert ids(source.all()) == [f"validation:{i}" for i in range(10)]
    assert ids(source.all(limit=3)) == ["validation:0", "validation:1", "validation:2"]
    assert source.state() == before


def test_the_length_is_that_of_the_usable_rows_and_finding_it_counts_nothing(config_of, tokenizer):
    rows = [*ROWS, {"prompt": "long " * 100}, {"prompt": 5}]
    source = PromptSource(config_of(rows, max_bad_rows=1, max_prompt_tokens=30), tokenizer, seed=0)
    assert len(source) == 10
    assert source.counters["data/over_long"] == source.counters["data/bad_rows"] == 0


def test_a_bad_row_is_named_and_ends_the_run_by_default(config_of, tokenizer):
    source = PromptSource(config_of([*ROWS, "{broken"], shuffle=False), tokenizer, seed=0)
    source.take(10)
    with pytest.raises(DataError) as caught:
        source.take(1)
    assert str(caught.value) == (
        "train.jsonl:11: not valid JSON (Expecting property name enclosed in double quotes at column 2). "
        "Unusable rows so far: 1; [data] max_bad_rows is 0. Fix the row, or raise max_bad_rows to skip such rows."
    )


def test_bad_rows_are_skipped_counted_and_named_up_to_the_limit(config_of, tokenizer, caplog):
    config = config_of([{"prompt": 5}, *ROWS[:2], b"\xff", {"other": 1}], shuffle=False, max_bad_rows=2)
    source = PromptSource(config, tokenizer, seed=0)
    with caplog.at_level(logging.WARNING):
        assert ids(source.take(2)) == ["train:1", "train:2"]
        with pytest.raises(
            DataError, match=r"train\.jsonl:5: no column 'prompt'.*[^.]\. Unusable rows so far: 3;"
        ):
            source.take(1)
    assert [record.getMessage() for record in caplog.records] == [
        "Skipped a row: train.jsonl:1: column 'prompt' must be text or a list of messages, got 5 (int).",
        "Skipped a row: train.jsonl:4: not valid UTF-8 (byte 0xff at column 1); save the file as UTF-8.",
    ]


def test_a_bad_row_counts_once_towards_the_limit_however_often_it_comes_up(config_of, tokenizer):
    source = PromptSource(config_of([*ROWS[:2], {"prompt": 5}], max_bad_rows=1), tokenizer, seed=0)
    assert len(source.take(8)) == 8
    assert source.state()["bad"] == [2]
    assert source.counters["data/bad_rows"] >= 3


def test_what_no_row_can_mend_shows_before_any_work(config_of, plain_tokenizer):
    with pytest.raises(DataError, match="has no chat template"):
        PromptSource(config_of([{"messages": [{"role": "user", "content": "hi"}]}]), plain_tokenizer, seed=0)
    with pytest.raises(DataError, match=r"train\.jsonl:1: no column 'prompt'.*Did you mean 'promt'\?"):
        PromptSource(config_of([{"promt": "hi"}]), plain_tokenizer, seed=0)


def test_over_long_rows_follow_the_policy(config_of, tokenizer, caplog):
    rows = [*ROWS[:3], {"prompt": "one two three " * 30}]
    keys = {"shuffle": False, "max_prompt_tokens": 30}
    source = PromptSource(config_of(rows, over_long="skip", **keys), tokenizer, seed=0)
    assert ids(source.take(4)) == ["train:0", "train:1", "train:2", "train:0"]
    assert source.counters["data/over_long"] == 1
    assert "train.jsonl:4: 91 tokens; [data] max_prompt_tokens is 30." in caplog.text

    source = PromptSource(config_of(rows, over_long="error", **keys), tokenizer, seed=0)
    with pytest.raises(DataError, match=r"4: 91 tokens; .* Raise it, or set over_long to skip in \[data\]"):
        source.take(4)


def test_an_epoch_without_a_usable_row_ends_instead_of_turning_for_ever(config_of, tokenizer):
    source = PromptSource(config_of(ROWS, max_prompt_tokens=1), tokenizer, seed=0)
    with pytest.raises(
        DataError, match=r"None of the 10 rows is usable\. Last: train\.jsonl:\d+: \d+ tokens;"
    ):
        source.take(1)


def test_the_first_bad_line_does_not_hide_the_layout_of_the_others(config_of, tokenizer):
    row = {"messages": [{"role": "user", "content": "hi"}]}
    source = PromptSource(config_of(["{broken", row, row], max_bad_rows=1, shuffle=False), tokenizer, seed=0)
    assert ids(source.take(2)) == ["train:1", "train:2"]


def test_each_file_may_have_a_layout_of_its_own(config_of, tokenizer, tmp_path):
    config = config_of([ROWS[0]], shuffle=False)
    verl = tmp_path / "verl.csv"
    verl.write_text('conversations\n"[{""from"": ""human"", ""value"": ""hi""}]"\n')
    config.train = [config.train, str(verl)]
    prompts = PromptSource(config, tokenizer, seed=0).take(2)
    assert [prompt.text[:12] for prompt in prompts] == ["What is 0 pl", "<|im_start|>"]


def test_counters_are_restored_with_the_position(config_of, tokenizer):
    config = config_of([*ROWS, {"prompt": 5}], max_bad_rows=1)
    source = PromptSource(config, tokenizer, seed=0)
    source.take(25)
    resumed = PromptSource(config, tokenizer, seed=0)
    resumed.load_state(source.state())
    assert resumed.counters == source.counters
    assert resumed.counters["data/epoch"] > 2


def test_files_with_other_numbers_of_rows_refuse_an_old_position(config_of, tokenizer):
    state = PromptSource(config_of(ROWS), tokenizer, seed=0).state()
    with pytest.raises(
        DataError, match=r"its files had \[10\] rows, now \[9\], so its position means other rows"
    ):
        PromptSource(config_of(ROWS[:9]), tokenizer, seed=0).load_state(state)


def test_files_of_other_content_are_remarked(config_of, tokenizer, caplog):
    state = PromptSource(config_of(ROWS), tokenizer, seed=0).state()
    PromptSource(config_of([*ROWS[:9], {"prompt": "new"}]), tokenizer, seed=0).load_state(state)
    assert "changed since the checkpoint, in content but not in number of rows" in caplog.text


@pytest.mark.parametrize("state", [{}, {"files": 3}, {"files": [{"rows": "x"}]}])
def test_a_state_of_something_else_is_refused(config_of, tokenizer, state):
    source = PromptSource(config_of(ROWS), tokenizer, seed=0)
    before = source.state()
    with pytest.raises(DataError, match="The checkpoint's data position cannot be read"):
        source.load_state(state)
    assert source.state() == before


def test_no_files_are_an_error(tokenizer):
    with pytest.raises(DataError, match=r"\[data\] validation names no file\."):
        PromptSource(DataConfig(train="x"), tokenizer, seed=0, split="validation")
    with pytest.raises(DataError, match="The train data passed from Python has 0 rows"):
        PromptSource(DataConfig(), tokenizer, seed=0, rows=[])


def test_rows_of_a_program_need_no_file(tokenizer):
    source = PromptSource(DataConfig(shuffle=False, num_workers=2), tokenizer, seed=0, rows=ROWS)
    assert ids(source.take(2)) == ["train:0", "train:1"]


def test_sft_examples_learn_the_mapped_response(config_of, tokenizer):
    config = config_of(ROWS, columns=ColumnsConfig(response="answer"), shuffle=False)
    (example,) = example_source(
        open_rows(config, "train", None), config, tokenizer, SFTOptions(), seed=0
    ).take(1)
    prompt = tokenizer.encode("What is 0 plus 7?")
    assert example.id == "train:0"
    assert example.token_ids == [*prompt, *tokenizer.encode("7"), tokenizer.eos_token_id]
    assert example.loss_mask == [False] * len(prompt) + [True, True]


def test_sft_follows_its_own_limit_in_workers_too(config_of, tokenizer):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    long = [{**turns[0], "content": "three " * 40}, turns[1]]
    rows = [{"messages": turns}, {"messages": long}]
    config = config_of(rows, max_prompt_tokens=1, num_workers=1, shuffle=False)
    source = example_source(
        open_rows(config, "train", None),
        config,
        tokenizer,
        SFTOptions(max_tokens=40, train_on_prompt=True),
        seed=0,
    )
    try:
        examples = source.take(2)
    finally:
        source.close()
    assert ids(examples) == ["train:0", "train:0"]
    assert all(examples[0].loss_mask[1:])
    assert source.counters["data/over_long"] == 1


def test_a_source_knows_the_columns_of_its_first_rows(config_of, tokenizer):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "hint": "c"}]
    assert PromptSource(config_of(rows), tokenizer, seed=0).columns() == {"answer", "hint"}


def test_a_source_knows_its_columns_where_the_first_rows_are_too_long(config_of, tokenizer):
    long = [{"prompt": f"{i} " * 400, "answer": "1"} for i in range(20)]
    rows = [*long, {"prompt": "ab", "hint": "c"}]
    source = PromptSource(config_of(rows, max_prompt_tokens=50), tokenizer, seed=0)
    assert source.columns() == {"hint"}
    none = PromptSource(config_of(long, max_prompt_tokens=3), tokenizer, seed=0)
    for asked in (none.columns, none.__len__):
        with pytest.raises(
            DataError,
            match=r"None of the 20 rows is usable\. Last: train\.jsonl:20: .* max_prompt_tokens is 3",
        ):
            asked()
