"""The transcript of an episode: turns, calls, times and versions."""

import torch

from engine_core.types import Prompt, Rollout
from engine_plugin_tools.commands.runs import _text
from engine_plugin_tools.transcripts import transcript

MESSAGES = [
    {"role": "assistant", "content": "calc", "seconds": 0.5},
    {
        "role": "tool",
        "content": "4",
        "seconds": 1.25,
        "calls": [
            {"name": "add", "seconds": 0.25},
            {"name": "", "seconds": 0.0, "failure": "error"},
        ],
    },
    {"role": "assistant", "content": "It is 4.", "seconds": 0.125},
]


def episode(learned=(2, 3, 6, 7), messages=MESSAGES, **fields):
    """Turn 1 is at 2 to 3, an answer at 4 to 5, turn 3 at 6 to 7."""
    mask = torch.zeros(8, dtype=torch.bool)
    mask[list(learned)] = True
    versions = torch.tensor([0, 0, 4, 4, 0, 0, 4, 6], dtype=torch.int32)
    turns = torch.tensor([0, 0, 1, 1, 1, 1, 3, 3], dtype=torch.int32)
    prompt = Prompt("train:0", [5, 6], "Q")
    return Rollout(
        "1:0:0", prompt, torch.arange(8), mask, torch.zeros(8), versions, "stop",
        messages=[dict(message) for message in messages], extras={"turns": turns}, **fields,
    )  # fmt: skip


def test_each_message_has_its_turn_versions_calls_and_time():
    assert [(entry.role, entry.text, entry.note) for entry in transcript(episode())] == [
        ("assistant", "calc", "turn 1, 2 tokens, version 4, 0.5 s"),
        ("tool", "4", "add 0.25 s, unreadable call (error) 0 s, 1.25 s"),
        ("assistant", "It is 4.", "turn 3, 2 tokens, version 4 to 6, 0.125 s"),
    ]


def test_a_turn_of_another_branch_and_a_rollout_that_names_no_turns_are_said():
    notes = [entry.note for entry in transcript(episode(learned=(6, 7)))]
    assert notes[0] == "turn 1, learned in another branch, 0.5 s"
    unknown = episode(messages=[*MESSAGES, MESSAGES[0]])  # a turn that the tokens do not have
    assert transcript(unknown)[0].note == "0.5 s"
    single = episode(messages=(), text="4")
    assert [(entry.role, entry.text, entry.note) for entry in transcript(single)] == [("assistant", "4", "")]


def test_inspect_shows_the_notes_and_the_number_of_a_branch():
    rollout = episode(rewards={"good": 1.0}, reward=1.0)
    rollout.request_id = "1:0:0/2"
    assert _text(rollout).splitlines() == [
        "--- train:0 #0 branch 2: reward 1 (good 1)",
        "Q",
        ">>> calc  [turn 1, 2 tokens, version 4, 0.5 s]",
        "<<< tool: 4  [add 0.25 s, unreadable call (error) 0 s, 1.25 s]",
        ">>> It is 4.  [turn 3, 2 tokens, version 4 to 6, 0.125 s]  [stop, 6 tokens in 2 turns]",
    ]
