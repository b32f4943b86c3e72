"""A conversation in OpenAI's form, made into what chat templates expect.

Owns the models of messages. Templates want text as content, and a call's arguments as an object.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from kvstore_engine.server.body import Text

MAX_MESSAGES = 4096


def _joined(content: Any) -> Any:
    """A text, or a list of text parts as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("must be text: this model reads nothing else")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("must have a text in each part")
    return "".join(texts)


def _arguments(value: Any) -> Any:
    """From JSON text, as OpenAI's API has it; what is no text is the value itself."""
    try:
        return json.loads(value or "{}") if isinstance(value, str) else value or {}
    except (ValueError, RecursionError):
        raise ValueError("must be JSON") from None


class CalledFunction(BaseModel):
    name: Text
    arguments: Annotated[Any, BeforeValidator(_arguments)] = {}


class MadeCall(BaseModel):
    id: Any = None
    function: CalledFunction


class Message(BaseModel):
    """One message. Fields that templates do not read are ignored."""

    model_config = ConfigDict(frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_joined)] | None = None
    tool_calls: list[MadeCall] | None = None
    name: Any = None
    tool_call_id: Any = None

    @model_validator(mode="after")
    def _combine(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("must be an assistant's, since it has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("needs a content: a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, object]:
        role = "system" if self.role == "developer" else self.role
        read: dict[str, object] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            read["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        for name in ("name", "tool_call_id"):
            if isinstance(value := getattr(self, name), str):
                read[name] = value
        return read
