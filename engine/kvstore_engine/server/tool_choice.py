"""Which of a request's tools the model is shown, and whether it has to call one of them: OpenAI's `tool_choice`.

Owns the forms of that field, of which each member is read or refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore_engine.server.api_errors import invalid

Tool = dict[str, Any]
_FORMS = "tool_choice must be none, auto, required, name one of the tools, or list allowed_tools"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names` None: all tools are meant, else those. `shows_others`: the prompt has the other tools, too."""

    is_forced: bool = False
    names: tuple[str, ...] | None = None
    shows_others: bool = True

    def among(self, tools: list[Tool]) -> tuple[list[Tool], list[Tool]]:
        """Return the tools that the model is shown, and the tools of which it must call one: none where it is free.
        ApiError for names without a tool."""
        chosen = tools
        if self.names is not None:
            by_name = {tool["function"]["name"]: tool for tool in tools}
            if not by_name.keys() >= set(self.names):
                raise invalid(_FORMS, "tool_choice")
            chosen = [tool for tool in tools if tool["function"]["name"] in self.names]
        if self.is_forced and not chosen:
            raise invalid(_FORMS, "tool_choice")
        return tools if self.shows_others else chosen, chosen if self.is_forced else []


def read_choice(value: Any) -> ToolChoice:
    """The choice that a `tool_choice` makes. ApiError for another form."""
    match value:
        case ToolChoice():
            return value
        case "none":
            return ToolChoice(names=(), shows_others=False)
        case "auto" | "required":
            return ToolChoice(is_forced=value == "required")
        case {"type": "function", "function": {"name": str(name), **more}, **beside} if not (more or beside):
            return ToolChoice(is_forced=True, names=(name,))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools), **more},
            **beside,
        } if tools and not (more or beside):
            return ToolChoice(mode == "required", tuple(map(_name, tools)), shows_others=False)
    raise invalid(_FORMS, "tool_choice")


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name), **more}, **beside} if not (more or beside):
            return name
    raise invalid(_FORMS, "tool_choice")
