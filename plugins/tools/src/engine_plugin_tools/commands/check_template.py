"""``engine check-template``: what the chat template of a tokenizer supports, and how the rest is handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.options import Json
from engine_core.config import ModelConfig
from engine_core.data import load_tokenizer
from engine_core.data.chat import ChatFormat
from engine_core.data.rows import BadRow
from engine_core.errors import DataError
from engine_plugin_tools.commands.checks import Check, show_checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = {"role": "system", "content": "Rule"}
QUESTION, MORE = {"role": "user", "content": "Q1"}, {"role": "user", "content": "Q2"}
FIRST, SECOND = {"role": "assistant", "content": "A1"}, {"role": "assistant", "content": "A2"}
ANSWER = {"role": "tool", "content": "42", "tool_call_id": "call00001", "name": "add"}
FUNCTION = {"name": "add", "arguments": {"of": "A1"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}},
}
THOUGHT = "<think>\nhm\n</think>\n\n"


def check_template(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or hub name, for its tokenizer.")
    ],
    as_json: Json = False,
) -> int:
    """Show what the chat template of a tokenizer supports: turns, tools, system messages, SFT, control tokens.

    Each line is ok, a warning where the engine handles it in another way, or a problem where such rows are
    refused; exit code 4 when there is a problem.

    Example: engine check-template tiny/chat
    """
    tokenizer = load_tokenizer(ModelConfig(path=model), "MODEL")
    return show_checks(check_lines(tokenizer), as_json, DataError.exit_code)


def check_lines(tokenizer: PreTrainedTokenizerBase) -> Iterator[Check]:
    """Yield all lines; a failed check does not stop the others.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    decode: Any = tokenizer.decode
    end, ids = tokenizer.eos_token_id, tokenizer.encode("A1", add_special_tokens=False)

    def tried(name: str, show: Callable[[ChatFormat], str]) -> Check:
        """Run one check and return its line."""
        form = ChatFormat(tokenizer)
        try:
            found = show(form)
        except BadRow as error:
            return Check("problem", name, str(error))
        except DataError as error:
            return Check("problem", name, str(error.__cause__ or error))
        notes = "; ".join(sorted(form.notes))
        return Check("warning" if notes else "ok", name, f"{notes}: {found}" if notes else found)

    if not tokenizer.chat_template:
        raise DataError("MODEL has no chat template: its rows are plain text. Name an instruct model.")
    yield tried("single turn", lambda form: repr(form.prompt([QUESTION]).text))
    yield tried("system message", lambda form: repr(form.prompt([SYSTEM, QUESTION]).text))
    yield tried("tools", lambda form: repr(form.prompt([QUESTION], [SCHEMA]).text))
    yield tried("further turn", lambda form: repr(decode(form.following([MORE], [end]))))
    yield tried("cut turn", lambda form: repr(decode(form.following([MORE], ids))))
    yield tried("tool answer", lambda form: repr(decode(form.following([ANSWER], [end]))))
    yield tried("SFT, two turns", lambda form: _learned(tokenizer, form, QUESTION, FIRST, MORE, SECOND))
    yield tried("SFT, tool call", lambda form: _learned(tokenizer, form, QUESTION, CALL, ANSWER, SECOND))
    yield tried("generation prompt", lambda form: repr(form.prompt([QUESTION]).text.rpartition("Q1")[2]))
    yield end_token(tokenizer)
    yield tried("thinking", _thinking)
    yield control_tokens(tokenizer)


def end_token(tokenizer: PreTrainedTokenizerBase) -> Check:
    """Return the token that ends a turn, and whether sampling stops there."""
    form = ChatFormat(tokenizer)
    try:
        rendered = form.conversation([QUESTION, FIRST])
    except (BadRow, DataError) as error:
        return Check("problem", "end token", str(error))
    learned = [i for i, mask in zip(rendered.token_ids, rendered.loss_mask, strict=True) if mask]
    last = [i for i in learned[-2:] if i in tokenizer.added_tokens_decoder][-1:]  # a line break may follow
    written = tokenizer.convert_ids_to_tokens(last)
    if not last:
        return Check("warning", "end token", "the template writes none, so SFT does not teach when to stop")
    if written[0] in form.ends:
        return Check("ok", "end token", f"{written[0]} = {last[0]}")
    advice = f"sampling does not stop there: set rollout.stop_token_ids = {last}"
    return Check("warning", "end token", f"{written[0]} = {last[0]}; {advice}")


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> Check:
    """Return whether text can contain the spelling of each control token without producing the token."""
    form = ChatFormat(tokenizer)
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    spellings = sorted(added | set(tokenizer.all_special_tokens))
    ids: Any = tokenizer.convert_tokens_to_ids(spellings)
    known = {i for i in ids if i != tokenizer.unk_token_id}
    for token in spellings:
        try:
            if not known.isdisjoint(form.text(f"a {token} b")):
                return Check("problem", "control tokens", f"text can write {token!r}")
        except BadRow as error:
            return Check("problem", "control tokens", str(error))
    return Check("ok", "control tokens", f"{len(added)}; text cannot write them")


def _learned(tokenizer: PreTrainedTokenizerBase, form: ChatFormat, *messages: dict[str, Any]) -> str:
    """Return the learned parts of a conversation, in order."""
    rendered = form.conversation(list(messages))
    pairs = zip(rendered.token_ids, rendered.loss_mask, strict=True)
    spans = [[token for token, _ in span] for learned, span in groupby(pairs, key=itemgetter(1)) if learned]
    return " ".join(repr(tokenizer.decode(span)) for span in spans)


def _thinking(form: ChatFormat) -> str:
    first, second = ({**turn, "content": THOUGHT + str(turn["content"])} for turn in (FIRST, SECOND))
    earlier = form.conversation([QUESTION, first, MORE, SECOND]).text
    last = form.conversation([QUESTION, FIRST, MORE, second]).text
    return ", ".join(
        f"{'kept' if THOUGHT.split()[1] in text else 'dropped'} in {turn}"
        for text, turn in ((last, "the last turn"), (earlier, "earlier turns"))
    )
