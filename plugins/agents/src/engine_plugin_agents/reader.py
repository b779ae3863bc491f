"""The reader of tool calls: from sampled tokens, in the form that a run names or that its chat template writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from engine_core.data.rows import BadRow
from engine_core.errors import DataError
from engine_plugin_agents.calls import ToolCall
from engine_plugin_agents.formats import harmony_content
from engine_plugin_agents.plugin import FORMATS

if TYPE_CHECKING:
    from engine_core.data.chat import ChatFormat
    from engine_core.plugins.plugin_set import PluginSet

Parse = Callable[[str, Mapping[str, Any]], list[ToolCall]]

AUTO, FALLBACK = "auto", "hermes"
GUARD = "\ufdd0"
"""A code point that is no character. It splits the text of a control token that was not sampled as one."""
PROBE = ToolCall("f", {"x": "8-d-8"}, id="call00001")
"""A call whose rendering shows the form of the template's calls."""
PROBE_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}

log = logging.getLogger("engine")


class CallReader:
    """The reader of the tool calls of one run.

    Args:
        chat: the chat template of the policy's tokenizer.
        plugins: the run's plugins, which may offer tool formats.
        name: `environment.tool_format`.
    """

    def __init__(self, chat: ChatFormat, plugins: PluginSet, name: str = AUTO) -> None:
        names = [*sorted(plugins.local_names("tool_formats")), *FORMATS] if name == AUTO else [name]
        # loaded here: the set of plugins must not change in the thread of episodes
        self._forms: dict[str, Parse] = {each: plugins.require("tool_formats", each) for each in names}
        self._noted = False
        self._chat, tokenizer = chat, cast("Any", chat.tokenizer)
        self._special = {
            i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._harmony = {"<|channel|>", "<|message|>"} <= {*self._special.values()}
        longest = sorted(map(re.escape, self._special.values()), key=len, reverse=True)
        self._control = re.compile("|".join(longest) or "(?!)")

    def read(self, token_ids: Sequence[int], tools: Any = ()) -> list[ToolCall]:
        """Return the calls of a sampled turn.

        Args:
            token_ids: the sampled tokens. A control token is one only if it was sampled as one token.
            tools: the JSON schemas that the prompt shows.
        """
        return self._read(self._parse, token_ids, parameters_of(tools))[1]

    def read_answer(self, token_ids: Sequence[int], tools: Any = ()) -> tuple[str | None, list[ToolCall]]:
        """Return the text that a sampled turn has for the user, and its calls.

        Args:
            token_ids: as in ``read``.
            tools: as in ``read``; without tools the turn has no calls.

        Returns:
            The text before the calls, or of the channels for the user (gpt-oss); None: the whole turn, which has no
            calls, or one that cannot be read.
        """
        text, calls = self._read(self._parse if tools else _nothing, token_ids, parameters_of(tools))
        if any(call.problem for call in calls):
            return None, []
        if self._harmony and "<|message|>" in text:
            return harmony_content(text).replace(GUARD, ""), calls
        return text[: calls[0].begin].replace(GUARD, "").strip() if calls else None, calls

    def note_tools(self) -> None:
        """Log a warning, once, if the chat template does not show the tools of requests."""
        if self._noted:
            return
        function = {"name": PROBE.name, "description": "", "parameters": PROBE_SCHEMA}
        question = [{"role": "user", "content": "a"}]
        with_tools = self._chat.prompt(question, [{"type": "function", "function": function}])
        if with_tools.text == self._chat.prompt(question).text:
            log.warning(
                "The chat template shows no tools: the policy does not see those of the harness's requests. Use a tokenizer "
                "with tool support ('engine check-template FOLDER'), or describe the tools in the messages."
            )
        self._noted = True

    @functools.cached_property
    def _parse(self) -> Parse:
        """The function of the tool format; ``auto`` finds it at the first use, by the call that the template writes."""
        if len(self._forms) == 1:
            return next(iter(self._forms.values()))
        name = next(filter(self._fits, self._forms), "")
        reason = "which the chat template writes" if name else "because no tool format fits the chat template"
        log.info("Tool calls are read as %s, %s.", name or FALLBACK, reason)
        return self._forms[name or FALLBACK]

    def _fits(self, name: str) -> bool:
        """Return whether a format reads the call that the chat template writes."""
        _, calls = self._read(self._forms[name], self._written, {PROBE.name: PROBE_SCHEMA})
        return [(call.name, call.arguments) for call in calls] == [(PROBE.name, PROBE.arguments)]

    @functools.cached_property
    def _written(self) -> list[int]:
        """The tokens that the chat template writes for a call; empty if it writes none."""
        for arguments in (PROBE.arguments, json.dumps(PROBE.arguments)):  # DeepSeek's templates take text
            function = {"name": PROBE.name, "arguments": arguments}
            call = {"id": PROBE.id, "type": "function", "function": function}
            turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
            with contextlib.suppress(BadRow, DataError):
                rendered = self._chat.conversation([{"role": "user", "content": "a"}, turn])
                return list(itertools.compress(rendered.token_ids, rendered.loss_mask))
        return []

    def _read(
        self, parse: Parse, token_ids: Sequence[int], schemas: Mapping[str, Any]
    ) -> tuple[str, list[ToolCall]]:
        """Return the text of a turn, with ``GUARD``, and its calls."""
        ids = list(token_ids)
        while ids and ids[-1] in self._special:
            ids.pop()
        runs = itertools.groupby(ids, self._special.__contains__)
        text = "".join(self._text(list(run), special) for special, run in runs)
        calls = parse(text, schemas)
        try:
            return text, [_plain(call) for call in calls] if GUARD in text else calls
        except RecursionError:
            return text, [ToolCall("", problem="the arguments are nested too deeply")]

    def _text(self, ids: list[int], special: bool) -> str:
        if special:
            return "".join(self._special[i] for i in ids)
        tokenizer: Any = self._chat.tokenizer
        return self._control.sub(lambda found: found[0][0] + GUARD + found[0][1:], tokenizer.decode(ids))


def parameters_of(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of the parameters of each tool, by name; tools of another form are left out."""
    schemas = dict[str, Mapping[str, Any]]()
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def _plain(call: ToolCall) -> ToolCall:
    """Return a call without ``GUARD``."""
    arguments = json.loads(json.dumps(call.arguments, ensure_ascii=False).replace(GUARD, ""))
    return dataclasses.replace(call, name=call.name.replace(GUARD, ""), arguments=arguments)


def _nothing(text: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Return no calls."""
    return []
