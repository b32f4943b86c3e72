"""A server's own account of what it restored: the endpoint, the command, the figures for Prometheus, and the trace.

A real daemon whose reads from NVMe are slow, so that the server computes and loads at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_proto.v1 import admin_pb2
from tests.reference.running_daemon import running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra server is not installed")


def _kvengine(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("kvengine")
    return subprocess.run([program, "restorations", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_server_shows_what_it_restored(tmp_path: Path) -> None:
    skip_without_ggml()
    model = write_tiny_llama(tmp_path / "tiny.gguf", byte_level_vocabulary())
    trace, prompt = tmp_path / "trace.json", {"prompt": list(range(5, 60)) * 8, "max_tokens": 8, "temperature": 0}
    texts = []
    with running_daemon("movement.in_flight=1", failpoints="nvme.read=delay:0.02") as daemon:
        for attempt in ("stores", "restores"):
            arguments = ["--kvstore", str(daemon.socket_dir), "--threads", "1"]
            server = RunningServer(tmp_path, model, *arguments, *(["--trace", str(trace)] * (attempt == "restores")))
            url = f"http://127.0.0.1:{server.port}"
            if attempt == "restores":
                daemon.drop("host")
                assert "nothing has been restored yet" in _kvengine("--url", url).stdout
            status, answer, _ = server.request("POST", "/v1/completions", prompt)
            assert status == 200, answer
            texts.append(answer["choices"][0]["text"])
            if attempt == "restores":
                status, found, _ = server.request("GET", "/restorations?last=1")
                shown = _kvengine("--url", url, "--json")
                table = _kvengine("--url", url).stdout
                metrics = server.request("GET", "/metrics")[1]
                assert server.request("GET", "/restorations?last=x")[0] == 400
            assert server.stop() == 0, server.log
            daemon.ask("Flush", admin_pb2.FlushRequest())
    assert texts[0] == texts[1], "restored, the answer is the same"
    (record,) = found["restorations"]
    assert json.loads(shown.stdout) == [record], shown.stderr
    assert record["chunks"] == 6 and record["tiers"] == {"nvme": 6} and record["plan"] in table
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values[f'kvengine_restorations_total{{plan="{record["plan"]}"}}']) == 1
    assert float(values['kvengine_restored_chunks_total{how="loaded"}']) == record["loaded"]
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    kinds = {work["kind"] for work in record["work"]}
    assert {f"sequence 1: restore, {kind}" for kind in kinds} <= names


@pytest.mark.slow
def test_a_server_that_is_not_there_is_one_line() -> None:
    done = _kvengine("--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "cannot be asked" in done.stderr
    assert _kvengine("--url", "nowhere").returncode == 2
    assert _kvengine("--last", "0").returncode == 2
    assert _kvengine("--api-key-file", "/nowhere").returncode == 2
