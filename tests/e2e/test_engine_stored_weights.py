"""The engine on weights that are an object of the store: mapped, never read again, and replaced under one name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client.objects.sources import gguf_source
from kvstore_client.objects.store import open_objects
from kvstore_engine import loaded_model
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.cli.main import main
from kvstore_engine.errors import UsageError
from kvstore_engine.generation import Prompt
from kvstore_engine.gguf import GGUFError, GGUFFile
from kvstore_engine.loaded_model import LoadOptions, open_model
from kvstore_engine.models.locate import locate
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

PROMPT = Prompt("the cat sat on the mat and the hat of the rat that ran. " * 4)
SETTINGS = RequestSettings(max_tokens=12, ignore_end=True)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_ggml()
    monkeypatch.setattr(loaded_model, "cache_root", lambda: tmp_path / "cache")


def put(daemon: RunningDaemon, path: Path, name: str = "tiny") -> str:
    with open_objects(daemon.socket_dir, staging_bytes=1 << 20) as store, gguf_source(path) as source:
        return store.put(name, source).version.digest.hex()


def answer(model: Path, sockets: Path) -> list[int]:
    with open_model(model, LoadOptions(threads=1, kvstore=sockets, warm_up=False)) as loaded:
        return loaded.generator.generate(PROMPT, SETTINGS).tokens


def test_stored_weights_answer_as_their_file_and_are_not_hashed(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny_llama(tmp_path / "tiny.gguf")
    wanted = answer(file, daemon.socket_dir)
    digest = put(daemon, file)
    file.unlink()

    def read(*_: object) -> None:
        raise AssertionError("the weights were read to be hashed")

    monkeypatch.setattr(GGUFFile, "digest", read)
    path = locate("kvstore:tiny", sockets=daemon.socket_dir)
    assert answer(path, daemon.socket_dir) == wanted
    with GGUFFile.open(path) as opened:
        assert opened.source.known_digest == (digest[:32], digest[32:])


def test_a_server_is_served_by_them_through_all_its_processes(daemon: RunningDaemon, tmp_path: Path) -> None:
    put(daemon, write_tiny_llama(tmp_path / "tiny.gguf"), "served")
    server = RunningServer(tmp_path, locate("kvstore:served", sockets=daemon.socket_dir))
    try:
        asked = {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
        status, body, _ = server.request("POST", "/v1/completions", asked | {"model": served_name(server)})
        assert status == 200 and body["usage"]["completion_tokens"] >= 1, body
    finally:
        server.close()


def served_name(server: RunningServer) -> str:
    name: str = server.request("GET", "/v1/models")[1]["data"][0]["id"]
    return name


def test_mistakes_are_one_clear_line(daemon: RunningDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="as it was put"):
        locate("kvstore:tiny", "q8_0")
    with open_objects(daemon.socket_dir, staging_bytes=1 << 20) as store:
        from kvstore_client.objects.sources import BytesSource

        store.put("text", BytesSource(b"no model"))
    for name, sockets, said in (
        ("kvstore:text", daemon.socket_dir, "and no GGUF file"),
        ("kvstore:nothing", daemon.socket_dir, "no object of this name"),
        ("kvstore:tiny", tmp_path, "kvstored"),
    ):
        with pytest.raises(GGUFError, match=said):
            GGUFFile.open(locate(name, sockets=sockets))
    assert main(["info", f"kvstore:nothing?{daemon.socket_dir}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
