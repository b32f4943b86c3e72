"""The HTTP process over an engine that is scripted: what is asked of it, what is made of its events, every refusal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.batching.events import Finished, Token, Usage
from kvstore_engine.server import body as request_body
from kvstore_engine.server.api_errors import ApiError, overloaded
from kvstore_engine.server.app import application
from kvstore_engine.server.engine_client import EventQueue
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.renderers import ChatRenderer, CompletionRenderer
from kvstore_engine.server.service import ServedModel, Service
from tests.reference.asgi_client import Response, call
from tests.reference.tiny_llama import write_tiny_llama

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MESSAGES = [{"role": "user", "content": "the cat"}]
_USAGE = Usage(prompt_tokens=10, local_tokens=4, daemon_tokens=2, computed_tokens=4, generated_tokens=2, ttft_s=0.1)


@dataclass
class _Engine:
    """Answers every request with `script`, or refuses it with `refusal`; `silent`: never answers."""

    script: Callable[[Ask], list[list[Any]]]
    context: int = 64
    pid: int = 1
    state: str = "ready"
    restarts: int = 0
    requests: int = 0
    trouble: str = ""
    refusal: ApiError | None = None
    silent: bool = False
    worker: dict[str, Any] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, asks: Sequence[Ask]) -> EventQueue:
        self.asks += asks
        queue = EventQueue()
        if self.refusal is not None:
            queue.put(self.refusal)
        elif not self.silent:
            for ask in asks:
                for events in self.script(ask):
                    queue.put(events)
        return queue

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids

    def forget(self, event: Finished) -> None:
        pass

    async def status(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        return None


def _two_tokens(ask: Ask) -> list[list[Any]]:
    """ "ab" for each answer, one step a token."""
    steps = [[Token(ask.id, i, 3 + k, text, -0.5, ((4, -0.25),)) for i in range(ask.n)] for k, text in enumerate("ab")]
    return [*steps, [Finished(ask.id, i, "end", _USAGE) for i in range(ask.n)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), "tiny", ())


def _service(model: ServedModel, engine: _Engine | None = None, keys: KeyRing | None = None) -> Service:
    return Service(model, engine or _Engine(_two_tokens), keys or KeyRing(None), Metrics(), 1 << 20)  # type: ignore[arg-type]


def _post(service: Service, path: str, body: Any, **options: Any) -> Response:
    return asyncio.run(call(application(service), "POST", path, body, **options))


def _events(response: Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_asked_and_answered(model: ServedModel) -> None:
    engine = _Engine(_two_tokens)
    body = {"messages": _MESSAGES, "n": 2, "stop": "x", "seed": 5, "top_p": 0.5, "max_completion_tokens": 7, "top_k": 9}
    answer = _post(_service(model, engine), _CHAT, body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["ab", "ab"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    (ask,) = engine.asks
    assert (ask.n, ask.stop, ask.max_tokens, ask.logprobs, ask.priority) == (2, ("x",), 7, None, 0)
    assert (ask.sampling.seed, ask.sampling.top_p, ask.sampling.top_k, ask.sampling.temperature) == (5, 0.5, 9, 1.0)
    text = model.tokenizer.decode(ask.tokens.tolist(), special=True)
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def test_a_stream_is_one_chunk_a_token_and_ends_with_usage(model: ServedModel) -> None:
    body = {"messages": _MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    response = _post(_service(model), _CHAT, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = _events(response)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]] == ["", "a", "b", None]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 12


def test_what_a_step_brought_is_sent_in_one_piece(model: ServedModel) -> None:
    engine = _Engine(lambda ask: [[event for step in _two_tokens(ask) for event in step]])
    app = application(_service(model, engine))
    sent: list[Any] = []

    async def run() -> None:
        body = [{"type": "http.request", "body": json.dumps({"prompt": "the", "n": 4, "stream": True}).encode()}]

        async def receive() -> Any:
            return body.pop() if body else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await app({"type": "http", "method": "POST", "path": _COMPLETIONS, "headers": []}, receive, send)

    asyncio.run(run())
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 3]
    assert sent[-1]["body"] == b""  # the end of the stream


def test_completions_take_lists_echo_and_logprobs(model: ServedModel) -> None:
    engine = _Engine(_two_tokens)
    service = _service(model, engine)
    answer = _post(service, _COMPLETIONS, {"prompt": ["the cat", [5, 6]], "echo": True}).json()
    assert answer["choices"][0]["text"] == "the catab"
    assert answer["choices"][1]["text"] == model.tokenizer.decode([5, 6]) + "ab"
    assert engine.asks[1].tokens.tolist() == [5, 6]
    assert engine.asks[0].max_tokens == 16
    logprobs = _post(service, _COMPLETIONS, {"prompt": "the", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {model.text_of(4): -0.25, model.text_of(3): -0.5}  # the chosen one, too
    assert logprobs["text_offset"] == [0, len(model.text_of(3))]


@pytest.mark.parametrize("echo", ["", "日🙂 "])
def test_offsets_are_places_in_the_text_whole_and_in_a_stream(model: ServedModel, echo: str) -> None:
    text = "aé日🙂d"
    tokens = model.tokenizer.encode_onwards(text)
    assert len(tokens) > len(text)  # characters of several tokens
    whole, streamed = (CompletionRenderer(model, [echo], with_logprobs=True) for _ in range(2))
    stream, chunks = model.tokenizer.stream(continues=True), []
    for token in tokens:
        event = Token("r", 0, token, stream.push(token), -0.5, ())
        whole.chunks(0, event)
        chunks += streamed.chunks(0, event)
    choice = whole.choice(0)
    assert choice["text"] == echo + text
    offsets, spelt = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets == [place for chunk in chunks for place in chunk["logprobs"]["text_offset"]]
    assert (offsets[0], offsets[-1]) == (len(echo), len(echo) + text.rindex("d"))
    assert sorted(set(offsets)) == list(range(len(echo), len(echo) + len(text)))
    parts = [token for token in spelt if token.startswith("bytes:")]
    spelt_bytes = b"".join(bytes.fromhex(part.removeprefix("bytes:").replace("\\x", "")) for part in parts)
    assert spelt_bytes.endswith("é日🙂".encode())


def test_an_answer_may_take_what_the_context_leaves(model: ServedModel) -> None:
    engine = _Engine(_two_tokens, context=20)
    service = _service(model, engine)
    assert _post(service, _COMPLETIONS, {"prompt": [5] * 12, "max_tokens": 100}).status == 200
    assert engine.asks[0].max_tokens == 9
    error = _post(service, _COMPLETIONS, {"prompt": [5] * 20}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(("path", "param"), [(_COMPLETIONS, "prompt"), (_CHAT, "messages")])
def test_a_text_that_is_far_too_long_is_not_tokenised(
    model: ServedModel, path: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cat " * model.longest * 64
    assert len(model.tokenizer.encode(text, True, True)) >= model.least_tokens(text) >= 64
    monkeypatch.setattr(model.tokenizer, "encode", None)
    error = _post(_service(model), path, {"prompt": text} if path == _COMPLETIONS else _saying(text)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "at least" in error["message"]


def _saying(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_call_that_is_followed_by_a_full_context_was_cut_off(model: ServedModel) -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    for reason, said in (("end", "tool_calls"), ("stop", "tool_calls"), ("length", "length"), ("context", "length")):
        renderer = ChatRenderer(model, 1, with_logprobs=False, reads_calls=True)
        renderer.chunks(0, Token("a", 0, 3, call))
        renderer.chunks(0, Finished("a", 0, reason, _USAGE))  # type: ignore[arg-type]  # one of the reasons
        assert renderer.choice(0)["finish_reason"] == said


def test_a_request_that_the_engine_refuses_keeps_its_status_in_a_stream(model: ServedModel) -> None:
    engine = _Engine(_two_tokens, refusal=overloaded("too many wait", 2.5))
    for stream in (False, True):
        response = _post(_service(model, engine), _CHAT, {"messages": _MESSAGES, "stream": stream})
        assert response.status == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_an_answer_that_fails_says_so_and_the_rest_is_cancelled(model: ServedModel) -> None:
    def fails(ask: Ask) -> list[list[Any]]:
        return [[Token(ask.id, 0, 3, "a")], [Finished(ask.id, 0, "failed", _USAGE, "ggml failed")]]

    engine = _Engine(fails)
    response = _post(_service(model, engine), _CHAT, {"messages": _MESSAGES, "n": 2})
    assert (response.status, response.json()["error"]["message"]) == (500, "ggml failed")
    assert engine.cancelled == [engine.asks[0].id]
    chunks = _events(_post(_service(model, engine), _CHAT, {"messages": _MESSAGES, "n": 2, "stream": True}))
    assert chunks[-1]["error"]["message"] == "ggml failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(model: ServedModel, stream: bool) -> None:
    engine = _Engine(_two_tokens, silent=True)
    service = _service(model, engine)

    async def run() -> None:
        leaves = asyncio.Event()
        body = {"messages": _MESSAGES, "stream": stream}
        request = asyncio.create_task(call(application(service), "POST", _CHAT, body, leaves=leaves))
        while not engine.asks:
            await asyncio.sleep(0)
        leaves.set()
        assert (await request).status == 499

    asyncio.run(run())
    assert engine.cancelled == [engine.asks[0].id]
    assert "kvengine_disconnects_total 1.0" in service.metrics.text(engine, None).decode()  # type: ignore[arg-type]


def test_while_the_engine_restarts_requests_get_503_and_a_time(model: ServedModel) -> None:
    from kvstore_engine.server.engine_client import EngineClient
    from kvstore_engine.server.options import EngineOptions

    client = EngineClient(EngineOptions("m.gguf"))
    client.state, client.context = "restarting", 64
    response = _post(_service(model, client), _CHAT, {"messages": _MESSAGES})  # type: ignore[arg-type]
    assert response.status == 503
    assert int(response.headers["retry-after"]) >= 1
    health = asyncio.run(call(application(_service(model, client)), "GET", "/health"))  # type: ignore[arg-type]
    assert (health.status, health.json()["status"]) == (503, "unavailable")


def test_a_server_that_drains_takes_nothing_in(model: ServedModel) -> None:
    service = _service(model)
    service.is_draining.set()
    assert _post(service, _CHAT, {"messages": _MESSAGES}).status == 503


def test_an_answer_that_is_cut_off_at_the_end_gets_503(model: ServedModel) -> None:
    engine = _Engine(_two_tokens, silent=True)
    service = _service(model, engine)

    async def run() -> Response:
        request = asyncio.create_task(call(application(service), "POST", _CHAT, {"messages": _MESSAGES}))
        while not engine.asks:
            await asyncio.sleep(0)
        service.is_draining.set()
        request.cancel()  # as uvicorn does when the time to drain is over
        return await request

    response = asyncio.run(run())
    assert (response.status, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert engine.cancelled == [engine.asks[0].id]


def test_a_stream_that_is_cut_off_at_the_end_says_so(model: ServedModel) -> None:
    engine = _Engine(lambda ask: [[Token(ask.id, 0, 3, "a")]])
    service = _service(model, engine)

    async def run() -> Response:
        body = {"messages": _MESSAGES, "stream": True}
        request = asyncio.create_task(call(application(service), "POST", _CHAT, body))
        for _ in range(20):
            await asyncio.sleep(0)  # the first token is sent by then
        service.is_draining.set()
        request.cancel()
        return await request

    response = asyncio.run(run())
    assert response.status == 200
    assert _events(response)[-1]["error"]["code"] == "engine_unavailable"
    assert engine.cancelled == [engine.asks[0].id]


def test_a_body_that_is_cut_off_at_the_end_gets_503(model: ServedModel) -> None:
    service, sent = _service(model), list[Any]()

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": _CHAT, "headers": []}
        request = asyncio.create_task(application(service)(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        service.is_draining.set()
        request.cancel()
        await request

    asyncio.run(run())
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (503, "engine_unavailable")


def test_an_unexpected_error_is_answered_and_raised(model: ServedModel) -> None:
    service, sent = _service(model, _Engine(lambda ask: 1 / 0)), list[Any]()  # type: ignore[arg-type, return-value]
    body = json.dumps({"messages": _MESSAGES}).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": _CHAT, "headers": []}
    with pytest.raises(ZeroDivisionError):  # for uvicorn, which logs it
        asyncio.run(application(service)(scope, receive, send))
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["type"]) == (500, "server_error")
    metrics = service.metrics.text(service.engine, None).decode()
    assert f'kvengine_responses_total{{path="{_CHAT}",status="500"}} 1.0' in metrics


_BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]}, "messages"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"max_tokens": 10**4000}, "max_tokens"),
    ({"top_p": 2}, "top_p"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ({"priority": "high"}, "priority"),
    ({"seed": "x"}, "seed"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "param"), _BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_malformed_chat_is_the_callers_mistake(model: ServedModel, fields: dict[str, Any], param: str) -> None:
    engine = _Engine(_two_tokens)
    body = ({} if "messages" in fields or not fields else {"messages": _MESSAGES}) | fields
    response = _post(_service(model, engine), _CHAT, body)
    assert response.status == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "") == param
    assert len(error["message"]) < 500
    assert engine.asks == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messges": _MESSAGES}, "messages is missing; is 'messges' meant for it?"),
        ({"messages": [*_MESSAGES, {"role": "king"}]}, "messages[1].role must be 'system', 'developer', 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content must be text"),
        ({"messages": _MESSAGES, "n": 65}, "n must be at most 64, got 65"),
        ({"messages": _MESSAGES, "seed": True}, "seed must be an integer, got a boolean"),
        ({"messages": _MESSAGES, "stop": {}}, "stop must be a string or a list of strings"),
        ({"messages": _MESSAGES, "stream_options": {"x": 1}}, "unknown field 'stream_options.x'"),
        ({"messages": _MESSAGES, "\ud800": 1}, "the body must be Unicode text"),
    ],
    ids=lambda value: str(value)[:40].encode(errors="replace").decode(),
)
def test_an_error_names_the_field_and_what_it_must_be(model: ServedModel, fields: dict[str, Any], says: str) -> None:
    assert _post(_service(model), _CHAT, fields).json()["error"]["message"].startswith(says)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], "x", None]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 33, "n": 2}, "n"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_a_malformed_completion_is_the_callers_mistake(
    model: ServedModel, fields: dict[str, Any], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _Engine(_two_tokens)
    monkeypatch.setattr(model.tokenizer, "add_bos", False)  # else even an empty text is a prompt
    response = _post(_service(model, engine), _COMPLETIONS, fields)
    assert response.status == 400
    assert response.json()["error"]["param"] == param
    assert engine.asks == []


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = [
    "messages", "prompt", "n", "stop", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens",
    "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "echo", "priority", "model",
    "structured_outputs", "chat_template_kwargs",
]  # fmt: skip


@given(path=st.sampled_from([_CHAT, _COMPLETIONS]), fields=st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=4))
def test_no_body_is_more_than_a_mistake(model: ServedModel, path: str, fields: dict[str, Any]) -> None:
    whole = ({"messages": _MESSAGES} if path == _CHAT else {"prompt": "the"}) | fields
    assert _post(_service(model), path, whole).status in (200, 400, 404)


@given(raw=st.binary(max_size=40))
def test_no_bytes_are_more_than_a_mistake(model: ServedModel, raw: bytes) -> None:
    assert _post(_service(model), _CHAT, raw).status == 400


def test_a_body_that_is_too_large_is_not_read(model: ServedModel) -> None:
    response = _post(_service(model), _CHAT, b" " * ((1 << 20) + 1))
    assert response.status == 413
    assert _post(_service(model), _CHAT, b"", headers={"Content-Length": str(1 << 30)}).status == 413


def test_a_body_that_does_not_come_is_not_waited_for(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.0)
    sent: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": _CHAT, "headers": []}
    asyncio.run(application(_service(model))(scope, never, send))
    assert sent[0]["status"] == 408


def test_paths_and_methods(model: ServedModel) -> None:
    app = application(_service(model))
    assert asyncio.run(call(app, "GET", "/v1/nothing")).status == 404
    wrong = asyncio.run(call(app, "GET", _CHAT))
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert asyncio.run(call(app, "GET", "/v1/models/nothing")).json()["error"]["code"] == "model_not_found"
    assert asyncio.run(call(app, "GET", "/v1/models/tiny")).json()["id"] == "tiny"


def test_keys_decide_tenant_and_priority(model: ServedModel, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-of-anna anna 3\nkey-of-bert bert\n")
    engine = _Engine(_two_tokens)
    service = _service(model, engine, KeyRing.read(file))

    def ask(key: str, **fields: Any) -> int:
        return _post(service, _CHAT, {"messages": _MESSAGES, **fields}, headers={"Authorization": key}).status

    assert ask("Bearer key-of-anna") == 200
    assert ask("Bearer key-of-anna", priority=9) == 200
    assert ask("bearer key-of-anna", priority=-2) == 200
    assert ask("Bearer key-of-bert") == 200
    assert [(ask.tenant, ask.priority) for ask in engine.asks] == [("anna", 3), ("anna", 3), ("anna", -2), ("bert", 0)]
    for wrong in ("", "Bearer", "Bearer x", "key-of-anna", "Basic key-of-anna"):
        assert ask(wrong) == 401
    assert asyncio.run(call(application(service), "GET", "/health")).status == 200
    assert asyncio.run(call(application(service), "GET", "/metrics")).status == 401


def test_bodies_that_arrive_slowly_have_a_bound_together() -> None:
    room = request_body.BodyRoom(100)
    room.take(all_bytes := 100 * request_body.BodyRoom.BODIES)
    with pytest.raises(ApiError) as caught:
        room.take(1)
    assert caught.value.status == 503
    room.give_back(all_bytes)
    room.take(1)
