"""The server as OpenAI's own client sees it: one real server on a tiny model, three processes, two tenants."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.reference.running_daemon import eventually
from tests.reference.running_server import RunningServer
from tests.reference.skips import openai_client, openai_library, skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

MODEL = "tiny"
KEYS = {"anna": "key-of-anna-0001", "bert": "key-of-bert-0002"}
_SEQUENCES, _QUEUED = 4, 6
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QUESTION = [{"role": "user", "content": "the cat sat on the mat and the hat of the rat that ran"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    skip_without_ggml()
    folder = tmp_path_factory.mktemp("server")
    vocabulary = byte_level_vocabulary() | {"tokenizer.chat_template": _TEMPLATE}
    model = write_tiny_llama(folder / "tiny.gguf", vocabulary)
    keys = folder / "keys"
    keys.write_text("# who may\n" + "".join(f"{key} {tenant} 5\n" for tenant, key in KEYS.items()))
    running = RunningServer(
        folder, model, "--served-name", MODEL, "--api-keys", str(keys), "--threads", "1",
        "--max-sequences", str(_SEQUENCES), "--max-queued", str(_QUEUED), "--drain-s", "5",
    )  # fmt: skip
    yield running
    assert running.stop() == 0, running.log
    assert "Traceback" not in running.log
    assert all(key not in running.log for key in KEYS.values())


def _client(server: RunningServer, tenant: str = "anna") -> Any:
    return openai_client(server.url, KEYS[tenant])


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with _client(server) as opened:
        yield opened


def _chat(client: Any, **fields: Any) -> Any:
    settings = {"model": MODEL, "messages": _QUESTION, "max_tokens": 24, "extra_body": {}, "temperature": 0}
    settings |= fields
    settings["extra_body"] = {"ignore_eos": "response_format" not in fields} | settings["extra_body"]
    return client.chat.completions.create(**settings)


def _complete(client: Any, prompt: Any, **fields: Any) -> Any:
    settings = {"model": MODEL, "max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}} | fields
    return client.completions.create(prompt=prompt, **settings)


def test_models_and_an_answer(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvengine"
    answer = _chat(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"n": 2, "seed": 3, "temperature": 1}]
)
def test_a_stream_says_what_the_whole_answer_says(client: Any, settings: dict[str, Any]) -> None:
    whole = _chat(client, logprobs=True, top_logprobs=2, **settings)
    texts, reasons = dict[int, str](), dict[int, str]()
    logprobs: dict[int, list[Any]] = {}
    usage = None
    for chunk in _chat(
        client, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, **settings
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index, "")
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(entry.token for entry in choice.logprobs.content)
    assert [texts[i] for i in sorted(texts)] == [choice.message.content for choice in whole.choices]
    assert [reasons[i] for i in sorted(reasons)] == [choice.finish_reason for choice in whole.choices]
    assert [logprobs[i] for i in sorted(logprobs)] == [
        [entry.token for entry in choice.logprobs.content] for choice in whole.choices
    ]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_repeats_and_another_differs(client: Any) -> None:
    def text(seed: int) -> str:
        answer = _chat(client, temperature=1.5, seed=seed).choices[0].message.content
        assert isinstance(answer, str)
        return answer

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_two_answers_to_one_prompt_count_it_once(client: Any) -> None:
    one = _chat(client, max_tokens=5)
    two = _chat(client, max_tokens=5, n=2, temperature=1.5, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].message.content != two.choices[1].message.content
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 10


def test_a_stop_string_ends_an_answer_and_is_not_shown(client: Any) -> None:
    text = _complete(client, "the cat", max_tokens=40).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = _complete(client, "the cat", max_tokens=40, stop=[stop, "\u0000never"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    streamed = "".join(
        chunk.choices[0].text for chunk in _complete(client, "the cat", max_tokens=40, stop=stop, stream=True)
    )
    assert streamed == stopped.text


def test_log_probabilities_are_probabilities(client: Any) -> None:
    entries = _chat(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    assert len(entries) == 24
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy
        assert 0 < sum(2.718281828**value for value in values) <= 1 + 1e-6
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    completion = _complete(client, "the", logprobs=3).choices[0]
    assert len(completion.logprobs.tokens) == len(completion.logprobs.text_offset) == 16
    assert all(len(top) <= 3 for top in completion.logprobs.top_logprobs)


def test_several_prompts_in_text_and_in_tokens(server: RunningServer, client: Any) -> None:
    status, tokenized, _ = server.request(
        "POST", "/tokenize", {"content": "the hat", "add_special": True, "with_pieces": True}, KEYS["anna"]
    )
    assert status == 200
    ids = [entry["id"] for entry in tokenized["tokens"]]
    assert "".join(entry["piece"] for entry in tokenized["tokens"]).endswith("the hat")
    answer = _complete(client, ["the hat", "the rat"], n=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:7] for choice in answer.choices] == ["the hat"] * 2 + ["the rat"] * 2
    assert _complete(client, [ids]).choices[0].text == answer.choices[0].text[7:]
    assert server.request("POST", "/detokenize", {"tokens": ids}, KEYS["anna"])[1]["content"].endswith("the hat")


def test_a_json_schema_is_followed(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra server is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason="the extra dev is not installed")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["name", "old", "n"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answers = _chat(client, response_format=named, n=3, temperature=1, seed=5, max_tokens=200)
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    with pytest.raises(openai_library().BadRequestError, match="JSON schema"):
        _chat(
            client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
        )
    with pytest.raises(openai_library().BadRequestError, match="no answer matches"):
        _chat(client, extra_body={"structured_outputs": {"regex": r"[^\s\S]"}, "ignore_eos": False})
    colour = _chat(client, extra_body={"structured_outputs": {"choice": ["red", "green"]}, "ignore_eos": False})
    assert colour.choices[0].message.content in ("red", "green")


def test_a_tool_that_must_be_called_is_called(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra server is not installed")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    fields = {"tools": tools, "tool_choice": "required", "max_tokens": 200, "extra_body": {"ignore_eos": False}}
    choice = _chat(client, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bern")
    streamed = [
        delta for chunk in _chat(client, stream=True, **fields) for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [delta.function.arguments for delta in streamed] == [call.function.arguments]
    messages = [*_QUESTION, choice.message.model_dump(exclude_none=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert _chat(client, messages=messages, tools=tools).choices[0].message.content


def test_a_tenant_sees_its_own_cached_tokens_only(server: RunningServer, client: Any) -> None:
    prompt = "a prompt of anna's own: " + "the cat sat on the mat. " * 12
    cached = [_complete(client, prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] >= 64
    with _client(server, "bert") as other:
        assert _complete(other, prompt).usage.prompt_tokens_details.cached_tokens == 0


def test_a_client_that_leaves_costs_nothing_more(server: RunningServer, client: Any) -> None:
    """The worker stands still meanwhile: the answers are surely not complete when their clients leave."""
    before, worker = _finished(server), server.health(KEYS["anna"])["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        for stream in (False, True):
            with pytest.raises(openai_library().APITimeoutError):
                _chat(client.with_options(timeout=0.2), max_tokens=400, stream=stream)
        assert eventually(lambda: server.health(KEYS["anna"])["engine"]["requests"] == 0)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert eventually(lambda: server.health(KEYS["anna"]).get("sequences") == {"running": 0, "waiting": 0})
    assert _finished(server) == before  # no client was sent an end


def _finished(server: RunningServer) -> list[str]:
    text = server.request("GET", "/metrics", key=KEYS["anna"])[1]
    return [line for line in text.splitlines() if line.startswith("kvengine_answers_total")]


def test_too_many_requests_get_429_and_a_time(server: RunningServer, client: Any) -> None:
    """The worker is stopped in the middle of an answer, so that nothing moves while the requests pile up."""
    worker = server.health(KEYS["anna"])["worker"]["pid"]
    stream = _caught(server, client, worker)
    wanted = _SEQUENCES + _QUEUED + 5
    try:
        with ThreadPoolExecutor(wanted) as pool:
            answers = [pool.submit(_ended, client) for _ in range(wanted)]
            everybody_waits = eventually(lambda: server.health(KEYS["anna"])["engine"]["requests"] >= wanted)
            os.kill(worker, signal.SIGCONT)
            ends = [answer.result() for answer in answers]
    finally:
        os.kill(worker, signal.SIGCONT)
    assert everybody_waits
    assert None in ends
    refused = [end for end in ends if end is not None]
    assert refused
    assert all(end.status_code == 429 and int(end.response.headers["retry-after"]) >= 1 for end in refused)
    assert sum(1 for _ in stream) > 0  # the one that ran is whole


def _caught(server: RunningServer, client: Any, worker: int) -> Iterator[Any]:
    """A stream in the middle of its answer, whose worker stands still."""
    for _ in range(20):
        stream = iter(_chat(client, stream=True, max_tokens=300))
        next(stream)
        os.kill(worker, signal.SIGSTOP)
        health = server.health(KEYS["anna"])
        if health["status"] == "busy" and health["engine"]["requests"]:
            return stream
        os.kill(worker, signal.SIGCONT)  # this test was too slow, and the answer complete
    raise AssertionError("every answer was complete before its worker could be stopped")


def _ended(client: Any) -> Any:
    try:
        _chat(client, max_tokens=2)
    except openai_library().APIStatusError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda client: _chat(client, model="other"), "NotFoundError", "model_not_found"),
        (lambda client: _complete(client, "the cat " * 400), "BadRequestError", "context_length_exceeded"),
        (lambda client: _chat(client, max_tokens=0), "BadRequestError", "max_tokens"),
        (lambda client: _chat(client, extra_body={"temprature": 1}), "BadRequestError", "unknown_parameter"),
        (
            lambda client: _chat(client.with_options(api_key="wrong-key-12345")),
            "AuthenticationError",
            "invalid_api_key",
        ),
    ],
)
def test_mistakes_are_errors_of_openais_client(client: Any, call: Callable[[Any], Any], error: str, words: str) -> None:
    with pytest.raises(getattr(openai_library(), error)) as caught:
        call(client)
    assert words in (caught.value.code, caught.value.param)


def test_health_is_open_and_its_details_are_not(server: RunningServer) -> None:
    assert server.health() == {"status": "ok"}
    detailed = server.health(KEYS["bert"])
    assert detailed["worker"]["state"] == "ready"
    assert detailed["kvstore"] == "off"
    assert server.request("GET", "/metrics")[0] == 401


def test_metrics_count(server: RunningServer, client: Any) -> None:
    _chat(client, max_tokens=3)
    text = server.request("GET", "/metrics", key=KEYS["anna"])[1]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["kvengine_engine_ready"]) == 1
    assert float(values['kvengine_tokens_total{kind="generated"}']) >= 3
    assert float(values["kvengine_time_to_first_token_seconds_count"]) >= 1
    assert float(values["kvengine_steps_total"]) >= 3
    assert float(values["kvengine_worker_deaths_total"]) == 0


def test_eight_clients_at_once_get_their_own_answers(server: RunningServer, client: Any) -> None:
    words = ["cat", "sat", "mat", "hat", "rat", "ran", "the", "and"]
    alone = [_complete(client, f"the {word}", max_tokens=8).choices[0].text for word in words]
    with ThreadPoolExecutor(len(words)) as pool:
        together = list(pool.map(lambda word: _complete(client, f"the {word}", max_tokens=8).choices[0].text, words))
    assert together == alone
