"""`/v1/embeddings` of a real server over a real daemon, as OpenAI's own client and raw requests see it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import openai_client, skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

TEXTS = ["the cat sat", "on the mat", "the cat sat", "and the hat of the rat"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


def serve(folder: Path, daemon: RunningDaemon, said: dict[str, Any], *arguments: str) -> RunningServer:
    skip_without_ggml()
    folder.mkdir()
    model = write_tiny_llama(folder / "tiny.gguf", byte_level_vocabulary() | said)
    return RunningServer(folder, model, "--threads", "1", "--kvstore", str(daemon.socket_dir), *arguments)


@pytest.fixture(scope="module")
def server(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("embeddings")
    keys = folder / "keys"
    keys.write_text("key-of-anna-0001 anna\nkey-of-bert-0002 bert\n")
    running = serve(folder / "one", daemon, {"llama.pooling_type": 1}, "--served-name", "tiny", "--api-keys", str(keys))
    yield running
    assert running.stop() == 0, running.log
    assert "Traceback" not in running.log


def stored(daemon: RunningDaemon) -> int:
    return sum(tier.blocks for tier in daemon.tiers().values() if tier.name == "host")


def embed(server: RunningServer, entries: Any, key: str = "key-of-anna-0001", **options: Any) -> Any:
    with openai_client(server.url, key) as client:
        return client.embeddings.create(model="tiny", input=entries, **options)


def test_vectors_are_read_where_they_are_stored(server: RunningServer, daemon: RunningDaemon) -> None:
    before = stored(daemon)
    first = embed(server, TEXTS)  # the client asks for base64
    assert stored(daemon) == before + 3
    vectors = np.array([each.embedding for each in first.data], np.float32)
    assert (vectors[0] == vectors[2]).all() and not np.allclose(vectors[0], vectors[1])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert [each.index for each in first.data] == [0, 1, 2, 3] and first.model == "tiny"
    tokens = [server.request("POST", "/tokenize", {"content": text}, "key-of-anna-0001")[1]["tokens"] for text in TEXTS]
    assert first.usage.prompt_tokens == first.usage.total_tokens == sum(map(len, tokens))
    for entries, options in ((TEXTS, {"encoding_format": "float"}), (tokens, {}), (TEXTS[::-1], {})):
        again = np.array([each.embedding for each in embed(server, entries, **options).data], np.float32)
        assert (again == (vectors[::-1] if entries == TEXTS[::-1] else vectors)).all()
    assert (np.array(embed(server, tokens[1]).data[0].embedding, np.float32) == vectors[1]).all()
    assert stored(daemon) == before + 3
    embed(server, TEXTS[0], key="key-of-bert-0002")  # another tenant's is its own
    assert stored(daemon) == before + 4


def test_a_restarted_server_reads_them_and_another_pooling_does_not(daemon: RunningDaemon, tmp_path: Path) -> None:
    def vectors(folder: Path, said: dict[str, Any], *arguments: str) -> Any:
        running = serve(folder, daemon, said, "--served-name", "tiny", *arguments)
        try:
            status, answer, _ = running.request("POST", "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
            assert status == 200, answer
            return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]
        finally:
            running.close()

    first, before = vectors(tmp_path / "a", {"llama.pooling_type": 3}), stored(daemon)
    assert np.array_equal(vectors(tmp_path / "b", {"llama.pooling_type": 3}), first) and stored(daemon) == before
    other = vectors(tmp_path / "c", {}, "--pooling", "mean")
    assert not np.allclose(other, first) and stored(daemon) == before + 3


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "must not have an empty text"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", []]}, "input", "must not have an empty text or list"),
        ({"input": [1.5]}, "input", "must be a string, a list of token ids"),
        ({"input": [-1]}, "input", "token ids must be"),
        ({"input": [[1] * 300] * 1001}, "input", "at most 300000 tokens"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 inputs"),
        ({"input": "a " * 5000}, "input", "context holds"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be 'float' or 'base64'"),
        ({"input": "a", "dimensions": 7}, "dimensions", "cannot be shortened"),
        ({"input": "a", "inputs": "b"}, "inputs", "unknown field"),
        ({"input": "a", "model": "gpt"}, "model", "no model 'gpt' here"),
    ],
)
def test_wrong_requests_get_openais_errors(server: RunningServer, body: Any, param: str, message: str) -> None:
    status, answer, _ = server.request("POST", "/v1/embeddings", body, "key-of-anna-0001")
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param and message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_model_that_says_no_pooling_makes_none(daemon: RunningDaemon, tmp_path: Path) -> None:
    running = serve(tmp_path / "silent", daemon, {})
    try:
        status, answer, _ = running.request("POST", "/v1/embeddings", {"input": "a"})
        assert status == 400 and "kvengine serve --pooling" in answer["error"]["message"]
    finally:
        running.close()
