"""A conversation in OpenAI's form, checked.

Owns the models of messages. A message keeps the form in which it came, and the fields that are not named here: what the
chat template reads of it is `kvstore_engine.template`'s to find out.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from kvstore_engine.server.body import Text
from kvstore_engine.template import MAY_BE_BARE

MAX_MESSAGES = 4096


def _content(content: Any) -> Any:
    """Return a text, a list of text parts, or None, which an empty list comes to."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("must be text: this model reads nothing else")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("must have a text in each part")
    return [{"type": "text", "text": text} for text in texts] or None


def _arguments(value: Any) -> Any:
    """Return JSON text, as OpenAI's API has it, or the value itself. ValueError for another text."""
    try:
        if isinstance(value, str) and value:
            json.loads(value, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ValueError("must be JSON with finite numbers") from None
    return value or {}


def _finite(text: str) -> float:
    """Return the number, which a template is to print again. ValueError for one that no float holds."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class CalledFunction(BaseModel):
    name: Text
    arguments: Annotated[Any, BeforeValidator(_arguments)] = {}


class MadeCall(BaseModel):
    id: Any = None
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        named = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**named, "type": "function", "function": function}


class Message(BaseModel):
    """One message. Templates may read fields that OpenAI's API does not have, such as `reasoning_content`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content)] = None
    tool_calls: list[MadeCall] | None = None

    @model_validator(mode="after")
    def _combine(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("must be an assistant's, since it has tool_calls")
        if self.content is None and self.role not in MAY_BE_BARE:
            raise ValueError("needs a content: a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, object]:
        read: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            read["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return read | {name: value for name, value in (self.model_extra or {}).items() if value is not None}
