"""Errors in the form that OpenAI's clients understand.

The module owns the statuses and types. A message says what was wrong and what to do, and never has a prompt or a key.
"""

from __future__ import annotations

import math
from typing import Any


class ApiError(Exception):
    """An exception that ends an HTTP request. The response has the given `status`, and a JSON body in the form of
    errors of OpenAI's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorised() -> ApiError:
    return ApiError(
        401,
        "no valid API key: send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(name: str, known: str) -> ApiError:
    return ApiError(404, f"no model {name!r} here; there is {known!r}", code="model_not_found", param="model")


def too_long(tokens: int, context: int, param: str, *, at_least: bool = False) -> ApiError:
    count = f"at least {tokens}" if at_least else str(tokens)
    return invalid(
        f"the prompt has {count} tokens and the context holds {context}, of which one is needed for the answer: "
        "shorten the prompt",
        code="context_length_exceeded",
        param=param,
    )


def overloaded(message: str, retry_after_s: float) -> ApiError:
    seconds = str(max(1, math.ceil(retry_after_s)))
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers={"Retry-After": seconds})


def unavailable(message: str, retry_after_s: float = 1.0) -> ApiError:
    seconds = str(max(1, math.ceil(retry_after_s)))
    return ApiError(503, message, kind="server_error", code="engine_unavailable", headers={"Retry-After": seconds})


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="answer_failed")
