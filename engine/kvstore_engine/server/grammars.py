"""The grammar that an answer has to follow, from OpenAI's `response_format` or vLLM's `structured_outputs`.

Owns the two forms, of which each member is done or refused. What a schema or a grammar may say, `constrain` checks.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvstore_engine.constrain import ANY_OBJECT, Grammar, GrammarError, check_grammar
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Flag, Text

Schema = dict[str, Any]


class NamedSchema(BaseModel):
    """A schema is followed to the letter, `strict` or not; the name and the description are for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None
    text: Schema | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """`text`: a schema beside the type `json_object`, as llama.cpp's server has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["text", "json_object", "json_schema"]
    text: Schema | None = Field(None, alias="schema")
    json_schema: NamedSchema | None = None


async def read_grammar(response_format: ResponseFormat | None, structured_outputs: dict[str, Any]) -> Grammar | None:
    """The grammar that one of the two asks for; None if neither does. ApiError 400 if it cannot be followed."""
    if response_format and structured_outputs:
        raise invalid("give response_format or structured_outputs, not both", "structured_outputs")
    if structured_outputs:
        return await checked(_structured(structured_outputs), "structured_outputs")
    if response_format is None:
        return None
    kind, beside, named = response_format.type, response_format.text, response_format.json_schema
    if beside is not None and kind != "json_object":
        raise invalid("response_format.schema is for the type 'json_object'", "response_format")
    if named is not None and kind != "json_schema":
        raise invalid("response_format.json_schema is for the type 'json_schema'", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        text = ANY_OBJECT if beside is None else json.dumps(beside)
        return await checked(Grammar("json_schema", text), "response_format")
    if named is None or named.text is None:
        raise invalid("response_format.json_schema.schema must be a JSON schema", "response_format")
    return await checked(Grammar("json_schema", json.dumps(named.text)), "response_format")


async def checked(grammar: Grammar, param: str) -> Grammar:
    """`grammar`, if answers can follow it. ApiError 400 if not. In a thread: a large one takes its time."""
    try:
        await asyncio.to_thread(check_grammar, grammar)
    except GrammarError as error:
        raise invalid(str(error), param) from None
    return grammar


def _structured(fields: dict[str, Any]) -> Grammar:
    if len(fields) != 1:
        raise invalid("structured_outputs takes one of json, regex, choice, grammar", "structured_outputs")
    ((name, value),) = fields.items()
    if name == "json" and isinstance(value, dict | str):
        return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))
    if name == "regex" and isinstance(value, str):
        return Grammar("regex", value)
    if name == "grammar" and isinstance(value, str):
        return Grammar("lark", value)
    if name == "choice" and isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))
    raise invalid(
        "structured_outputs takes one of: json (a schema), regex (a string), choice (a list of strings), "
        "grammar (a string in Lark's syntax)",
        "structured_outputs",
    )
