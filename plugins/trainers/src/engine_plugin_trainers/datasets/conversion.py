"""Conversion of rows of public data sets to the columns that ``[data]`` reads, and the rows that are left out.

A function ``convert(row)`` returns the columns ``prompt``, ``answer`` and ``response``, or ``messages``, or ``prompt``,
``chosen`` and ``rejected``. Other columns stay, because rewards receive them. A function ``usable(row)`` returns whether
a row can be used at all.
"""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]
Message = dict[str, str]

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def gsm8k(row: Row) -> Row:
    """Split the worked solution: the text after ``####``, without thousands separators, is the answer."""
    solution = row["answer"]
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    return {"prompt": row["question"], "answer": answer, "response": solution}


def math(row: Row) -> Row:
    r"""Take the answer from the last ``\boxed{}`` of the solution."""
    return problem({**row, "answer": last_boxed(row["solution"])})


def problem(row: Row) -> Row:
    """Rename ``problem`` to ``prompt`` and ``solution`` to ``response``, where the set has solutions."""
    names = {"problem": "prompt", "solution": "response"}
    return {names.get(name, name): value for name, value in row.items()}


def has_answer(row: Row) -> bool:
    """Return whether the row has an answer."""
    return bool(row["answer"])


def dapo(row: Row) -> Row:
    """Take ``solution``, which is the final answer, and drop the columns that repeat it in the layout of verl."""
    repeated = ("solution", "reward_model", "source_prompt")
    kept = {name: value for name, value in row.items() if name not in repeated}
    return {**kept, "answer": row["solution"]}


def openr1(row: Row) -> Row:
    """Take the assistant's turn of ``messages`` as the response; drop the generations and what is known of each."""
    kept = ("answer", "solution", "problem_type", "question_type", "source", "uuid")
    response = row["messages"][-1]["content"]
    return {"prompt": row["problem"], "response": response, **{name: row[name] for name in kept}}


def ultrachat(row: Row) -> Row:
    """Drop ``prompt``, which repeats the first message."""
    return {name: value for name, value in row.items() if name != "prompt"}


def ultrafeedback(row: Row) -> Row:
    """Divide both conversations into prompt and reply; drop ``messages``, which repeats the better one."""
    rest = {name: value for name, value in row.items() if name != "messages"}
    return {**rest, **pair(row["chosen"], row["rejected"])}


def different(row: Row) -> bool:
    """Return whether the two responses differ."""
    return bool(row["chosen"] != row["rejected"])


def hh_rlhf(row: Row) -> Row:
    """Read both conversations and divide them into prompt and reply."""
    return pair(turns(row["chosen"]), turns(row["rejected"]))


def pair(chosen: list[Message], rejected: list[Message]) -> Row:
    """Return the columns of two conversations that differ in their last turn."""
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def judged(row: Row, desirable: bool) -> Row:
    """Return one response of a pair, with its label for KTO."""
    rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    return {**rest, "response": row["chosen" if desirable else "rejected"], "label": desirable}


def one_reply_differs(row: Row) -> bool:
    """Return whether two conversations differ in their last turn alone, and that turn is the assistant's in both."""
    chosen, rejected = turns(row["chosen"]), turns(row["rejected"])
    last = [conversation[-1] for conversation in (chosen, rejected) if len(conversation) > 1]
    assistants = [turn for turn in last if turn["role"] == "assistant" and turn["content"]]
    return len(assistants) == 2 and chosen != rejected and chosen[:-1] == rejected[:-1]


def turns(text: str) -> list[Message]:
    r"""Return the messages of a conversation in text, ``\n\nHuman: ...\n\nAssistant: ...``."""
    _, *parts = TURN.split(text)
    return [
        {"role": ROLES[role], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def last_boxed(solution: str) -> str:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}`` with balanced braces; the text itself without one."""
    found = list(re.finditer(r"\\(?:boxed|fbox)\s*", solution))
    if not found:
        return solution
    rest = solution[found[-1].end() :]
    if not rest.startswith("{"):  # \boxed 7
        return rest.partition("$")[0].strip()
    depth = 0
    for end, char in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return rest[1:end]
    return rest[1:]
