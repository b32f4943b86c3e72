"""Makes a pydantic model of a request's fields; values that the model refuses become errors in OpenAI's form.

The module owns the types for models of bodies, and the wording of errors: the field, the mistake, and never a text of
the request. `null` counts as absent, as in OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails
from starlette.requests import Request

from kvstore_engine.server.api_errors import ApiError, invalid, unavailable

M = TypeVar("M", bound=BaseModel)
BODY_TIMEOUT_S = 120.0
_MOST_SHOWN = 40  # characters of a number: it may have thousands of digits
_REASONS = {
    "string_type": "must be a string, got {got}",
    "bool_type": "must be true or false, got {got}",
    "int_type": "must be an integer, got {got}",
    "float_type": "must be a number, got {got}",
    "finite_number": "must be a finite number",
    "list_type": "must be a list, got {got}",
    "dict_type": "must be an object, got {got}",
    "model_type": "must be an object, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "string_unicode": "must be Unicode text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "too_long": "takes at most {max_length} items",
    "value_error": "{error}",
}
_KINDS = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
"""An integer; 2.0 is one in JSON, true and "2" are not."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def unsupported(why: str, *neutral: object) -> AfterValidator:
    """Return a validator for a request field that this server does not support. It accepts only the values `neutral`,
    which change nothing; for others the error says `why`.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in neutral:
            raise not_supported(str(info.field_name), why)
        return value

    return AfterValidator(check)


def not_supported(name: str, why: str) -> ApiError:
    return invalid(f"{name} is not supported: {why}", name, code="unsupported_parameter")


class BodyRoom:
    """A limit on the memory for the bodies of HTTP requests that are arriving: at most `most_bytes` for one body, and
    16 times that for all.
    """

    BODIES = 16

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._used_bytes = 0

    def take(self, nbytes: int) -> None:
        """Reserve `nbytes` bytes for an arriving request body. Raises ApiError 503 if other bodies have reserved too
        much.
        """
        if self._used_bytes + nbytes > self.BODIES * self.most_bytes:
            raise unavailable("too many large bodies are arriving at once")
        self._used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self._used_bytes -= nbytes


async def read_fields(request: Request, room: BodyRoom) -> dict[str, Any]:
    """Read the body of `request` and return the fields of its JSON object by name. `room` limits the memory for bodies.
    Raises ApiError: 400 for anything else than a JSON object, 413 for a body that is too large, 503 if other bodies
    take the memory, 408 if the body does not arrive within 120 s.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await _whole_body(request, room)
    except TimeoutError:
        message = f"the body was not complete within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise invalid("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return {name: field for name, field in value.items() if field is not None}


async def _whole_body(request: Request, room: BodyRoom) -> bytes:
    """Return the whole body. Starlette's `max_body_size` is not used, since it answers in plain text."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal():
        raise invalid("the Content-Length header is not a number")
    pieces, total, taken = [], int(announced), 0
    try:
        if total <= room.most_bytes:
            total = 0
            async for piece in request.stream():
                room.take(len(piece))
                taken += len(piece)
                pieces.append(piece)
                total += len(piece)
                if total > room.most_bytes:
                    break
        if total > room.most_bytes:
            raise ApiError(413, f"the body is larger than {room.most_bytes} bytes", code="request_too_large")
        return b"".join(pieces)
    finally:
        room.give_back(taken)


def read(model: type[M], fields: dict[str, Any]) -> M:
    """Check `fields` against the pydantic class `model` and return an instance of it. Raises ApiError 400; the message
    names the first wrong field.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _mistake(error.errors(include_url=False)) from None


def _mistake(errors: list[ErrorDetails]) -> ApiError:
    """Return an error for the first of `errors`. A misspelt field is named with the missing field that it resembles."""
    unknown = [str(error["loc"][-1]) for error in errors if error["type"] == "extra_forbidden"]
    first = errors[0]
    path = _path(first["loc"]) or "the body"
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field {path!r}", str(first["loc"][0]), code="unknown_parameter")
    reason = _REASONS.get(first["type"])
    text = first["msg"] if reason is None else reason.format(got=_shown(first["input"]), **first.get("ctx", {}))
    if first["type"] == "missing" and (near := get_close_matches(path, unknown, 1)):
        text += f"; is {near[0]!r} meant for it?"
    return invalid(f"{path} {text}", str(first["loc"][0]) if first["loc"] else None)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a location as text, such as `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _KINDS.get(type(value), "something else")
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
