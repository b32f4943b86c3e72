"""`/tokenize` and `/detokenize`: how much at once, and that no other request waits for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvstore_engine.server import inquiries
from kvstore_engine.server.app import application
from kvstore_engine.server.engine_client import EngineClient
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.server.service import ServedModel, Service
from tests.reference.asgi_client import Response, call
from tests.reference.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), "tiny", ())


def _service(model: ServedModel) -> Service:
    return Service(model, EngineClient(EngineOptions("m.gguf")), KeyRing(None), Metrics(), 32 << 20)


def _post(service: Service, path: str, body: Any) -> Response:
    return asyncio.run(call(application(service), "POST", path, body))


def test_more_text_than_is_tokenised_at_once_is_refused(model: ServedModel) -> None:
    service = _service(model)
    for name in ("content", "prompt"):
        refused = _post(service, "/tokenize", {name: "a" * (inquiries.MAX_CHARACTERS + 1)})
        assert refused.status == 400
        assert refused.json()["error"]["param"] == name
        assert str(inquiries.MAX_CHARACTERS) in refused.json()["error"]["message"]
    refused = _post(service, "/detokenize", {"tokens": [1] * (inquiries.MAX_TOKENS + 1)})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "tokens")


def test_a_long_text_is_tokenised_beside_the_event_loop(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    text_of = ServedModel.text_of

    def noted(self: ServedModel, token: int) -> str:
        threads.add(threading.current_thread())
        return text_of(self, token)

    monkeypatch.setattr(ServedModel, "text_of", noted)
    response = _post(_service(model), "/tokenize", {"content": "the cat " * 2000, "with_pieces": True})
    assert len(response.json()["tokens"]) == response.json()["count"] > 2000
    assert threads and threading.main_thread() not in threads
