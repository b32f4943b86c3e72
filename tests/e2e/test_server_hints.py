"""The server hints to a real daemon when an answer has ended: what follows it, where that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.readers import ReadOptions, read_trace
from tests.reference.running_daemon import running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra server is not installed")

_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"const": {}}}}]
_CALLS = {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 100}
_CHOICE = {"structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 100}


_CASES: list[tuple[str, dict[str, Any], str, int]] = [
    ("chat/completions", _CALLS, "tool_calls", NextStep.NEXT_STEP_TOOL_CALL),
    ("chat/completions", _CHOICE, "stop", NextStep.NEXT_STEP_END_OF_TURN),
    ("chat/completions", {"max_tokens": 9, "ignore_eos": True}, "length", NextStep.NEXT_STEP_UNSPECIFIED),
    ("completions", _CHOICE, "stop", NextStep.NEXT_STEP_UNSPECIFIED),
]


@pytest.mark.slow
def test_what_follows_an_answer_is_hinted_where_it_is_known(tmp_path: Path) -> None:
    skip_without_ggml()
    model = write_tiny_llama(tmp_path / "tiny.gguf", byte_level_vocabulary() | {"tokenizer.chat_template": _TEMPLATE})
    record = tmp_path / "trace.jsonl.gz"
    expected = []
    with running_daemon(f"daemon.record={record}") as daemon:
        server = RunningServer(tmp_path, model, "--kvstore", str(daemon.socket_dir), "--threads", "1")
        for number, (path, fields, reason, step) in enumerate(_CASES):
            text = f"{number} " + "the cat sat on the mat " * 9
            asked = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
            status, answer, _ = server.request("POST", f"/v1/{path}", {**asked, **fields})
            assert status == 200 and answer["choices"][0]["finish_reason"] == reason, answer
            expected.append((step, answer["usage"]["completion_tokens"]))
        assert server.stop() == 0, server.log
    hints = read_trace(record, "kvstored", ReadOptions(), lambda done, total: None).hints
    assert [(hint.next_step, hint.answer_tokens) for hint in hints] == expected
