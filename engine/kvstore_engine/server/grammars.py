"""The grammar that an answer has to follow, from OpenAI's `response_format` or vLLM's `structured_outputs`.

Owns the two forms. What a schema or a grammar may say, `constrain` checks.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvstore_engine.constrain import ANY_OBJECT, Grammar, GrammarError, check_grammar
from kvstore_engine.server.api_errors import invalid


async def read_grammar(response_format: dict[str, Any], structured_outputs: dict[str, Any]) -> Grammar | None:
    """The grammar that one of the two asks for; None if neither does. ApiError 400 if it cannot be followed."""
    if response_format and structured_outputs:
        raise invalid("give response_format or structured_outputs, not both", "structured_outputs")
    if structured_outputs:
        return await checked(_structured(structured_outputs), "structured_outputs")
    if not response_format:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return await checked(Grammar("json_schema", ANY_OBJECT), "response_format")
        case "json_schema":
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise invalid("response_format.json_schema.schema must be a JSON schema", "response_format")
            return await checked(Grammar("json_schema", json.dumps(schema)), "response_format")
    raise invalid("response_format.type must be 'text', 'json_object' or 'json_schema'", "response_format")


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
