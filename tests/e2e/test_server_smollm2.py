"""The server on a real model, through OpenAI's client. Skipped where the model is not in the cache."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore_engine.models.locate import locate
from tests.reference.running_server import RunningServer
from tests.reference.skips import openai_client, skip_without_ggml, skip_without_model

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")
pytestmark = pytest.mark.slow

NAME = "smollm2-135m-instruct"
_QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    skip_without_ggml()
    skip_without_model(NAME)
    folder = tmp_path_factory.mktemp("server")
    running = RunningServer(
        folder, locate(f"{NAME}:q8_0"), "--served-name", NAME, "--context", "1024", "--kv-dtype", request.param
    )
    yield running
    assert running.stop() == 0, running.log


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai_client(server.url, "-", timeout_s=200) as opened:
        yield opened


def _stream(client: Any, **fields: Any) -> Iterator[str]:
    for chunk in client.chat.completions.create(
        model=NAME, messages=_QUESTION, max_tokens=24, temperature=0, stream=True, **fields
    ):
        yield chunk.choices[0].delta.content or ""


def test_it_knows_a_capital(client: Any) -> None:
    answer = client.completions.create(model=NAME, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text


def test_an_answer_is_the_same_if_its_worker_is_killed_meanwhile(server: RunningServer, client: Any) -> None:
    whole = "".join(_stream(client))
    pieces = []
    for number, piece in enumerate(_stream(client)):
        pieces.append(piece)
        if number == 4:
            os.kill(server.health()["worker"]["pid"], signal.SIGKILL)
    assert "".join(pieces) == whole
    assert server.health()["worker"]["deaths"] == 1


def test_it_fills_in_a_form(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra server is not installed")
    properties = {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=NAME,
        messages=_QUESTION,
        max_tokens=100,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    place = json.loads(answer.choices[0].message.content)
    assert place["country"] in ("France", "Spain")
    assert 0 < len(place["city"]) <= 20


def test_a_second_question_computes_only_what_is_new(client: Any) -> None:
    system = {"role": "system", "content": "You answer questions about geography. " * 20}
    for number in range(2):
        usage = client.chat.completions.create(
            model=NAME, messages=[system, *_QUESTION], max_tokens=4, temperature=0
        ).usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached == 0 if number == 0 else cached >= usage.prompt_tokens - 64
