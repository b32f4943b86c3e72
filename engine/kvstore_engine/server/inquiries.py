"""Answers the endpoints that generate nothing: models, health, and the tokenizer by itself.

The module owns their JSON. `/tokenize` and `/detokenize` have the fields of llama.cpp's and vLLM's servers. The words
of `/health`: "ok": all parts work. "degraded": answers are given, but kvstored cannot be reached, so that prompts are
computed. "unavailable" (503): no answers now.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvstore_engine.server.api_errors import invalid, unknown_model
from kvstore_engine.server.body import Flag, Text, read
from kvstore_engine.server.completions import token_array
from kvstore_engine.server.service import Service

MAX_CHARACTERS = 1 << 20  # a second or two of work in a thread
MAX_TOKENS = 1 << 19


def _token_ids(values: list[Any]) -> list[Any]:
    if not all(type(value) is int for value in values):
        raise ValueError("must be a list of token ids")
    return values


class TokenizeBody(BaseModel):
    """The fields of a `/tokenize` request. The text is in `content` or in `prompt`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: Text | None = None
    content: Text | None = None
    prompt: Text | None = None
    add_special: Flag = False
    add_special_tokens: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    model: Text | None = None
    tokens: Annotated[list[Any], Field(max_length=MAX_TOKENS), AfterValidator(_token_ids)]


def models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service)]}


def model(service: Service, name: str) -> dict[str, Any]:
    if name not in service.model.aliases:
        raise unknown_model(name, service.model.name)
    return _model(service)


async def tokenize(fields: dict[str, Any], service: Service) -> dict[str, Any]:
    """Return the token ids and their count for the text in `fields`, as the JSON of `/tokenize`. Raises ApiError for
    wrong fields.
    """
    body = read(TokenizeBody, fields)
    service.model.check_name(body.model)
    if (body.content is None) == (body.prompt is None):
        raise invalid("give the text as content (or prompt)", "content")
    text, param = (body.content, "content") if body.content is not None else (body.prompt or "", "prompt")
    if len(text) > MAX_CHARACTERS:
        raise invalid(
            f"the text has {len(text)} characters, and at most {MAX_CHARACTERS} are tokenised at once: send parts",
            param,
        )
    add_special = body.add_special or body.add_special_tokens
    tokens = await service.model.encode(text, add_special=add_special, parse_special=body.parse_special)
    ids: list[Any] = tokens.tolist()
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.engine.context}
    if body.with_pieces:
        answer["tokens"] = await asyncio.to_thread(_pieces, ids, service)
    return answer


async def detokenize(fields: dict[str, Any], service: Service) -> dict[str, Any]:
    """Return the text of the token ids in `fields`, control tokens included, as the JSON of `/detokenize`. Raises
    ApiError for wrong fields.
    """
    body = read(DetokenizeBody, fields)
    service.model.check_name(body.model)
    text = await service.model.decode(token_array(body.tokens, service, "tokens").tolist())
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


async def health(service: Service, *, in_detail: bool) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON of `/health`: 200 while requests are answered, otherwise 503. With
    `in_detail`, for callers with a key, the JSON describes the processes of the server.
    """
    engine = service.engine
    status = await engine.status()
    if service.is_draining.is_set():
        word = "draining"
    elif engine.state != "ready":
        word = "unavailable"
    elif status is None:
        word = "busy"  # in a long step, or waiting for a new worker: requests are still taken in
    else:
        word = "degraded" if status["kvstore"] == "degraded" else "ok"
    code = 503 if word in ("draining", "unavailable") else 200
    body: dict[str, Any] = {"status": word}
    if in_detail:
        body |= {
            "engine": {
                "state": engine.state,
                "pid": engine.pid,
                "restarts": engine.restarts,
                "requests": engine.requests,
            },
            "worker": engine.worker,
            "kvstore": status["kvstore"] if status else "unknown",
            "model": service.model.name,
            "context": engine.context,
        }
        if engine.trouble:
            body["engine"]["trouble"] = engine.trouble
        if status:
            body |= {"pool": status["pool"], "sequences": status["sequences"]}
    return code, body
