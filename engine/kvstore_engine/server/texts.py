"""The endpoints that need no engine: models, and the tokenizer by itself.

Owns their JSON. The fields of `/tokenize` and `/detokenize` are those of llama.cpp's server and of vLLM's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore_engine.server.api_errors import ApiError, invalid, unknown_model
from kvstore_engine.server.body import Body
from kvstore_engine.server.completions import token_array
from kvstore_engine.server.service import Service

MAX_CHARACTERS = 1 << 20  # a second or two of work in a thread
MAX_TOKENS = 1 << 19


def models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service)]}


def model(service: Service, name: str) -> dict[str, Any]:
    if name not in service.model.aliases:
        raise unknown_model(name, service.model.name)
    return _model(service)


async def tokenize(fields: dict[str, Any], service: Service) -> dict[str, Any]:
    """`content` or `prompt`, `add_special` (or `add_special_tokens`), `parse_special`, `with_pieces`."""
    body = Body(fields)
    service.model.check_name(body.text("model"))
    text = body.text("content")
    prompt = body.text("prompt")
    if (text is None) == (prompt is None):
        raise invalid("give the text as content (or prompt)", "content")
    add_special = body.flag("add_special") or body.flag("add_special_tokens")
    parse = body.take("parse_special")
    if parse not in (None, True, False):
        raise invalid("parse_special must be true or false", "parse_special")
    with_pieces = body.flag("with_pieces")
    body.end()
    content = text if text is not None else prompt or ""
    if len(content) > MAX_CHARACTERS:
        raise invalid(
            f"the text has {len(content)} characters, and at most {MAX_CHARACTERS} are tokenised at once: send parts",
            "content" if text is not None else "prompt",
        )
    tokens = await service.model.encode(content, add_special=add_special, parse_special=parse is not False)
    ids: list[Any] = tokens.tolist()
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.engine.context}
    if with_pieces:
        answer["tokens"] = await asyncio.to_thread(_pieces, ids, service)
    return answer


async def detokenize(fields: dict[str, Any], service: Service) -> dict[str, Any]:
    """`tokens` to `content`, control tokens with it."""
    body = Body(fields)
    service.model.check_name(body.text("model"))
    tokens = body.take("tokens")
    body.end()
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise invalid("tokens must be a list of token ids", "tokens")
    if len(tokens) > MAX_TOKENS:
        raise invalid(
            f"{len(tokens)} tokens are more than the {MAX_TOKENS} that are turned into text at once", "tokens"
        )
    ids = token_array(tokens, service, "tokens")
    text = await service.model.decode(ids.tolist())
    return {"content": text, "prompt": text}


def _pieces(ids: list[int], service: Service) -> list[dict[str, Any]]:
    return [{"id": token, "piece": service.model.text_of(token)} for token in ids]


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "kvengine",
        "max_model_len": service.engine.context,
    }


__all__ = ["ApiError", "detokenize", "model", "models", "tokenize"]
