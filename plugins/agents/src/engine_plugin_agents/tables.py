"""The table of tool formats: ``engine_tool_formats``, entry-point group ``engine.tool_formats``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.hooks import hookspec
from engine_core.specs import Spec


@dataclass(frozen=True, kw_only=True)
class ToolFormat(Spec):
    """A form in which models write tool calls: ``load`` is ``def parse(text, schemas) -> list[ToolCall]``."""

    kind = "tool_formats"
    noun = "tool format"
    given = ("text", "schemas")


SPECS = {"tool_formats": ToolFormat}


@hookspec
def engine_tool_formats() -> Mapping[str, ToolFormat]:
    """Offer forms of tool calls for ``[environment] tool_format = "NAME"``.

    :returns: a ``ToolFormat`` for each name. Its function gets the text of a sampled turn, with special tokens except those at the end,
        and the JSON schemas of the parameters by tool name. It returns a ``ToolCall`` for each call in the text, one with a
        ``problem`` for a call that it cannot read. ``begin`` is the position of the call; the policy endpoint returns the text before
        the first call as content::

            def parse(text, schemas):
                return [ToolCall(name, {"x": x}) for name, x in re.findall("<<(.*?):(.*?)>>", text)]


            @hookimpl
            def engine_tool_formats():
                return {"mine": ToolFormat(load=parse)}

    Collects from all plugins; entry-point group ``engine.tool_formats``. Called once in the controller. Not collective.
    """
