"""Every member of a request's body is done, has no effect by its nature, or is refused by its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_engine.batching.answer import StopStrings
from kvstore_engine.batching.events import Finished, Token, Usage
from kvstore_engine.restore.session import NextStep
from kvstore_engine.server.app import application
from kvstore_engine.server.engine_client import EventQueue
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.renderers import ChatRenderer
from kvstore_engine.server.service import ServedModel, Service
from kvstore_engine.server.tools import OneCall, next_step
from kvstore_engine.tokenizer.vocabulary import CONTROL
from tests.reference.asgi_client import Response, call
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MESSAGES = [{"role": "user", "content": "the cat"}]
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1.50}}\n</tool_call>'
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
_NAMED = {"type": "function", "function": {"name": "g"}}
_JSON, _SCHEMA = {"type": "json_object"}, {"type": "json_schema"}
_NONE_OF_THEM = [{"type": "function", "function": {"name": "h"}}]
_UNKNOWN = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": _NONE_OF_THEM}}


class _Engine:
    """Keeps what it is asked, and answers with one token."""

    context, pid, state, restarts, requests, trouble = 4096, 1, "ready", 0, 0, ""

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    def submit(self, asks: Sequence[Ask]) -> EventQueue:
        self.asks += asks
        queue = EventQueue()
        for ask in asks:
            queue.put([Token(ask.id, 0, 3, "a", None, ()), Finished(ask.id, 0, "end", Usage())])
        return queue

    def cancel(self, request_ids: Sequence[str]) -> None:
        pass

    def forget(self, event: Finished) -> None:
        pass


def _opened(folder: Path, template: str) -> ServedModel:
    vocabulary = byte_level_vocabulary() | {"tokenizer.chat_template": template}
    return ServedModel.open(write_tiny_llama(folder / "tiny.gguf", vocabulary), "tiny", ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return _opened(tmp_path_factory.mktemp("model"), _TEMPLATE)


def _post(model: ServedModel, path: str, body: Any) -> tuple[Response, list[Ask]]:
    engine = _Engine()
    service = Service(model, engine, KeyRing(None), Metrics(), 1 << 20)  # type: ignore[arg-type]  # of it what is used
    return asyncio.run(call(application(service), "POST", path, body)), engine.asks


def _asked(model: ServedModel, **fields: Any) -> Ask:
    response, asks = _post(model, _CHAT, {"messages": _MESSAGES} | fields)
    assert response.status == 200, response.json()
    return asks[0]


_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "response_format.schema"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", "response_format.json_schema"),
    ({"response_format": _JSON | {"json_schema": {"schema": {}}}}, "response_format", "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "response_format.schema"),
    ({"response_format": _SCHEMA | {"json_schema": {"schema": {}, "strikt": True}}}, "response_format", "strikt"),
    ({"response_format": _SCHEMA | {"json_schema": {"schema": {}, "strict": "yes"}}}, "response_format", "strict"),
    ({"response_format": _JSON | {"grammar": "x"}}, "response_format", "response_format.grammar"),
    ({"response_format": _JSON | {"schema": {"type": "wrong"}}}, "response_format", "JSON schema"),
    ({"response_format": _JSON | {"schema": {"not": {"type": "string"}}}}, "response_format", "not"),
    ({"response_format": {}}, "response_format", "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "response_format.type"),
    ({"structured_outputs": {"regex": "x", "backend": "y"}}, "structured_outputs", "one of"),
    ({"guided_json": {}}, "guided_json", "guided_json"),
    ({"audio": {"voice": "x"}}, "audio", "audio"),
    ({"prediction": {"type": "content"}}, "prediction", "prediction"),
    ({"web_search_options": {}}, "web_search_options", "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"verbosity": "low"}, "verbosity", "verbosity"),
    ({"service_tier": "flex"}, "service_tier", "service_tier"),
    ({"store": True}, "store", "store"),
    ({"min_p": 0.1}, "min_p", "min_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "repetition_penalty"),
    ({"min_tokens": 5}, "min_tokens", "min_tokens"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation", "include_obfuscation"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": _TOOLS}, "tool_choice", "tool_choice"),
    ({"tool_choice": _NAMED | {"mode": "auto"}, "tools": _TOOLS}, "tool_choice", "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": _TOOLS}, "tool_choice", "tool_choice"),
    ({"tool_choice": _UNKNOWN, "tools": _TOOLS}, "tool_choice", "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools", "functions"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "functions"),
    ({"use_beam_search": True}, "use_beam_search", "is not supported: answers are sampled"),
    ({"length_penalty": 0.5}, "length_penalty", "beam search"),
    ({"early_stopping": "never"}, "early_stopping", "beam search"),
    ({"n": 2, "best_of": 4}, "best_of", "best_of"),
    ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "messages", "function_call"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages", "audio"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages", "refusal"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages", "prefix"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages", "text"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages", "text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "needs a content"),
    ({"messages": [{"role": "user"}]}, "messages", "needs a content"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), _REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_done_is_refused_by_its_name(
    model: ServedModel, fields: dict[str, Any], param: str, words: str
) -> None:
    response, asks = _post(model, _CHAT, {"messages": _MESSAGES} | fields)
    assert response.status == 400
    error = response.json()["error"]
    assert (error["param"], asks) == (param, [])
    assert words in error["message"]


def test_calls_that_are_not_read_cannot_be_counted(tmp_path: Path) -> None:
    other = _opened(tmp_path, "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages }}")
    response, _ = _post(other, _CHAT, {"messages": _MESSAGES, "tools": _TOOLS, "parallel_tool_calls": False})
    assert (response.status, response.json()["error"]["param"]) == (400, "parallel_tool_calls")
    response, _ = _post(other, _CHAT, {"messages": _MESSAGES, "tools": _TOOLS, "parallel_tool_calls": True})
    assert response.status == 200


def test_what_clients_send_by_habit_is_taken(model: ServedModel) -> None:
    habits: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "parallel_tool_calls": True, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0, "tools": None,
        "audio": None,
        "tool_choice": None, "response_format": {"type": "text"}, "modalities": ["text"], "stop": None, "n": 1,
        "stream_options": None, "functions": None, "function_call": None, "verbosity": "medium", "top_k": -1,
        "skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False,
        "best_of": 1, "add_generation_prompt": True, "continue_final_message": False,
    }  # fmt: skip
    echoed = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None}
    messages = [*_MESSAGES, echoed | {"function_call": None, "tool_calls": None}, *_MESSAGES]
    assert _asked(model, messages=messages, **habits).grammar is None
    for content in (None, []):
        _asked(model, messages=[*_MESSAGES, {"role": "assistant", "content": content}, *_MESSAGES])


def test_a_schema_beside_json_object_is_followed(model: ServedModel) -> None:
    schema = {"type": "object", "properties": {"status": {"const": "ok"}}}
    grammar = _asked(model, response_format=_JSON | {"schema": schema}).grammar
    assert grammar is not None and json.loads(grammar.text) == schema
    named = {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "strict": True, "schema": schema}}
    assert _asked(model, response_format=named).grammar == grammar


def test_the_smaller_of_two_limits_holds(model: ServedModel) -> None:
    assert _asked(model, max_tokens=5, max_completion_tokens=9).max_tokens == 5
    assert _asked(model, max_tokens=9, max_completion_tokens=5).max_tokens == 5


def test_allowed_tools_are_those_that_the_model_is_shown(model: ServedModel) -> None:
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_NAMED]}}
        ask = _asked(model, tools=_TOOLS, tool_choice=allowed)
        prompt = model.tokenizer.decode(ask.tokens.tolist(), special=True)
        assert ('"name": "f"' in prompt, '"name": "g"' in prompt) == (False, True)
        assert (ask.grammar is not None) == (mode == "required")
    ask = _asked(model, tools=_TOOLS, tool_choice=_NAMED)
    assert ask.grammar is not None and '"name\\":\\"f' not in ask.grammar.text
    assert '"name": "f"' in model.tokenizer.decode(ask.tokens.tolist(), special=True)
    ask = _asked(model, tools=_TOOLS, tool_choice="none")
    assert (ask.grammar, '"name"' in model.tokenizer.decode(ask.tokens.tolist(), special=True)) == (None, False)


def test_without_parallel_calls_an_answer_ends_with_its_first(model: ServedModel) -> None:
    assert _asked(model, tools=_TOOLS, parallel_tool_calls=False).one_call
    assert not _asked(model, tools=_TOOLS, parallel_tool_calls=False, tool_choice="required").one_call
    assert not _asked(model, tools=_TOOLS).one_call
    text = f"The mark <tool_call> opens.\n{_CALL}\n{_CALL}"
    ends = []
    for turn in ("tool", "tool_after_thought"):
        one, shown = OneCall(model.tokenizer, turn, None), ""  # type: ignore[arg-type]  # it is one of these
        for token in model.tokenizer.encode_onwards(text):
            if one.finished:
                break
            assert one.mask() is None
            one.accept(token)
            shown += model.tokenizer.piece(token).decode()
        ends.append(shown)
    assert ends == [text.removesuffix(f"\n{_CALL}"), text]


def test_strict_tools_are_kept_to_their_schemas(model: ServedModel, tmp_path: Path) -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}]
    grammar = _asked(model, tools=strict).grammar
    assert grammar is not None and grammar.text.startswith("start: part*")
    forced = _asked(model, tools=strict, tool_choice="required").grammar
    assert forced is not None and forced.text.startswith('start: "<tool_call>"')
    other = _opened(tmp_path, "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages }}")
    response, _ = _post(other, _CHAT, {"messages": _MESSAGES, "tools": strict})
    assert (response.status, response.json()["error"]["param"]) == (400, "tools")


def test_a_prompt_that_opens_a_thought_is_answered_in_it(tmp_path: Path) -> None:
    thinking = _opened(tmp_path, _TEMPLATE + "assistant: <think>\n")
    ask = _asked(thinking, tools=_TOOLS)
    assert ask.turn == "tool_after_thought"
    assert _asked(thinking, tools=_TOOLS, tool_choice="required").turn == "tool"
    answer = thinking.tokenizer.encode_onwards(f"Maybe {_CALL}")
    expected: NextStep = "end_of_turn"
    assert next_step(thinking.tokenizer, ask.turn, answer) == expected


@pytest.mark.parametrize("stop", ["Answer:", "\nB", "never"])
def test_a_mark_without_a_text_stands_where_the_model_wrote_it(tmp_path: Path, stop: str) -> None:
    vocabulary = byte_level_vocabulary()
    tokens, kinds = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    vocabulary["tokenizer.ggml.tokens"] = [*tokens, "<tool_call>", "</tool_call>"]  # type: ignore[misc]  # a list
    vocabulary["tokenizer.ggml.token_type"] = np.append(kinds, np.array([CONTROL, CONTROL], np.int32))  # type: ignore[arg-type]
    path = write_tiny_llama(tmp_path / "marks.gguf", vocabulary | {"tokenizer.chat_template": _TEMPLATE})
    model = ServedModel.open(path, "tiny", ())
    renderer, stream = (
        ChatRenderer(model, 1, with_logprobs=False, reads_calls=True),
        model.tokenizer.stream(continues=True),
    )
    stops = StopStrings((stop,))  # holds back what may become one, while marks come
    for token in model.tokenizer.encode(f"An A{_CALL}\nA{_CALL}", False, True).tolist():
        renderer.chunks(0, Token("r", 0, token, stops.push(stream.push(token))[0], None, ()))
    renderer.chunks(0, Finished("r", 0, "end", Usage(), "", stops.finish()))
    said = renderer.choice(0)["message"]
    assert (said["content"], len(said["tool_calls"])) == ("An A\nA", 2)


@pytest.mark.parametrize(
    "text", [_CALL, f"One.\n{_CALL}\n\n- a  b\n{_CALL}\n", f"\n{_CALL}\n", "a <tool_call> b", " \n"]
)
def test_a_stream_says_what_the_whole_answer_says(model: ServedModel, text: str) -> None:
    renderer, stream = (
        ChatRenderer(model, 1, with_logprobs=False, reads_calls=True),
        model.tokenizer.stream(continues=True),
    )
    deltas = []
    for token in model.tokenizer.encode_onwards(text):
        deltas += renderer.chunks(0, Token("r", 0, token, stream.push(token), None, ()))
    deltas += renderer.chunks(0, Finished("r", 0, "length", Usage(), "", stream.finish()))
    said = renderer.choice(0)["message"]
    content = "".join(chunk["delta"].get("content", "") for chunk in deltas)
    calls = [part for chunk in deltas for part in chunk["delta"].get("tool_calls", ())]
    assert content == (said["content"] or "")
    assert [{key: part[key] for key in ("id", "type", "function")} for part in calls] == said.get("tool_calls", [])
    assert [part["index"] for part in calls] == list(range(len(calls)))
    assert all(part["function"]["arguments"] == '{"x": 1.50}' for part in calls)
    outside = text.replace(_CALL, "")
    assert said["content"] == (outside if outside.strip() or not calls else None)
