"""engine check-template: what a template supports, what is handled in another way, and what is refused."""

from __future__ import annotations

import json

import pytest
from chat_templates import FAMILIES, save, tokenizer_of

from engine_core.errors import DataError
from engine_plugin_tools.commands.check_template import check_template
from engine_plugin_tools.plugin import engine_commands

NAMES = [
    "single turn",
    "system message",
    "tools",
    "further turn",
    "cut turn",
    "tool answer",
    "SFT, two turns",
    "SFT, tool call",
    "generation prompt",
    "end token",
    "thinking",
    "control tokens",
]


@pytest.fixture
def checked(tmp_path, capsys):
    """Return ``checked(name)``: the exit code and the lines by name."""

    def check(name):
        code = check_template(str(save(name, tmp_path / name)), as_json=True)
        lines = json.loads(capsys.readouterr().out)
        assert [line["name"] for line in lines] == NAMES
        return code, {line["name"]: line for line in lines}

    return check


def test_it_is_a_command():
    assert (
        engine_commands()["check-template"].load
        == "engine_plugin_tools.commands.check_template:check_template"
    )


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_usable_but_for_calls_that_its_template_leaves_out(checked, name):
    code, lines = checked(name)
    problems = {line["name"] for line in lines.values() if line["state"] == "problem"}
    assert problems == (set() if FAMILIES[name].calls else {"SFT, tool call"})
    assert code == (4 if problems else 0)
    assert lines["tool answer"]["state"] == ("warning" if FAMILIES[name].notes else "ok")
    assert lines["system message"]["state"] == ("warning" if FAMILIES[name].system_notes else "ok")
    assert lines["further turn"]["state"] == lines["SFT, two turns"]["state"] == "ok"


def test_lines_show_what_the_template_writes(checked):
    _, lines = checked("qwen3_5")
    assert lines["generation prompt"]["found"] == repr("<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert lines["SFT, two turns"]["found"] == "'A1<|im_end|>' '\\n</think>\\n\\nA2<|im_end|>'"
    assert lines["thinking"]["found"] == "kept in the last turn, dropped in earlier turns"
    assert lines["control tokens"] == {
        "state": "ok",
        "name": "control tokens",
        "found": "3; text cannot write them",
    }


def test_an_end_at_which_sampling_does_not_stop_is_a_warning(checked):
    _, lines = checked("llama3")
    end = tokenizer_of("llama3").convert_tokens_to_ids("<|eot_id|>")
    assert lines["end token"]["state"] == "warning"
    assert lines["end token"]["found"].endswith(f"set rollout.stop_token_ids = [{end}]")
    assert checked("no_end")[1]["end token"]["state"] == "warning"
    assert checked("qwen3")[1]["end token"]["found"].startswith("<|im_end|> = ")


def test_people_get_a_table(tmp_path, capsys):
    assert check_template(str(save("qwen2_5", tmp_path / "model"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["ok"] * len(NAMES)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="MODEL has no chat template"):
        check_template(str(tmp_path))
    with pytest.raises(DataError, match="there is no folder"):
        check_template(str(tmp_path / "absent"))
