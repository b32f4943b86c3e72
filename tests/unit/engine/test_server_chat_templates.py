"""A chat request becomes a prompt: what the template reads of the request, and what is refused since it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.server import chat
from kvstore_engine.server.api_errors import ApiError
from kvstore_engine.server.keys import ANYBODY, KeyRing
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.service import ServedModel, Service
from kvstore_engine.template import ChatTemplate
from kvstore_engine.tokenizer import Tokenizer
from tests.reference.tiny_llama import byte_level_vocabulary, sentencepiece_vocabulary, write_tiny_llama

_QUESTION = {"role": "user", "content": "the cat"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
_HERMES = "{% for tool in tools %}{{ tool.function.name }}<tool_call>{% endfor %}" + _PLAIN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), "tiny", ())


def _prompt(model: ServedModel, source: str, messages: list[Any], **fields: Any) -> str:
    """Return the text of the prompt that a request with `source` as the model's template comes to."""
    served = replace(model, template=ChatTemplate(source))
    service = Service(served, SimpleNamespace(context=512), KeyRing(None), Metrics(), 1 << 20)  # type: ignore[arg-type]
    plan = asyncio.run(chat.plan({"messages": messages, **fields}, ANYBODY, service))
    return model.tokenizer.decode(plan.asks[0].tokens.tolist(), special=True)


def test_variables_reach_a_template_that_reads_them(model: ServedModel) -> None:
    source = "{{ reasoning_effort or 'medium' }},{{ enable_thinking }};" + _PLAIN
    assert _prompt(model, source, [_QUESTION]) == "medium,;user:the cat;"
    more = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert _prompt(model, source, [_QUESTION], **more) == "high,False;user:the cat;"
    assert _prompt(model, _PLAIN, [_QUESTION], reasoning_effort="high") == "user:the cat;"


@pytest.mark.parametrize("name", ["enable_thinking", "messages", "add_generation_prompt"])
def test_variables_that_it_does_not_read_are_refused(model: ServedModel, name: str) -> None:
    with pytest.raises(ApiError, match=f"^chat_template_kwargs.{name} is not read") as error:
        _prompt(model, _PLAIN, [_QUESTION], chat_template_kwargs={name: []})
    assert (error.value.status, error.value.param) == (400, "chat_template_kwargs")


def test_a_message_that_the_template_leaves_out_is_refused(model: ServedModel) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\] does not reach the prompt") as error:
        _prompt(model, "{{ messages[-1].content }}", [_QUESTION, {"role": "user", "content": "cat"}])
    assert (error.value.status, error.value.param) == (400, "messages")


def test_tools_that_the_template_leaves_out_are_refused_and_those_that_are_not_to_be_used_are_not(
    model: ServedModel,
) -> None:
    with pytest.raises(ApiError, match=r"^tools\[0\] does not reach the prompt") as error:
        _prompt(model, _PLAIN, [_QUESTION], tools=[_TOOL])
    assert (error.value.status, error.value.param) == (400, "tools")
    assert _prompt(model, _PLAIN, [_QUESTION], tools=[_TOOL], tool_choice="none") == "user:the cat;"


def test_calls_and_other_fields_come_as_they_were_sent(model: ServedModel) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}({{ m.note }}){% for c in m.tool_calls or [] %}"
        "{{ c.id is defined }}{{ c.function.name + c.function.arguments }}{% endfor %};{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": '{"x":1.50}'}}]
    messages = [_QUESTION, {"role": "assistant", "content": None, "tool_calls": calls, "note": "n", "refusal": None}]
    assert _prompt(model, source, messages) == 'the cat();(n)Falsef{"x":1.50};'


@pytest.mark.parametrize("arguments", ["{", '{"x":1e400}', '{"x":NaN,"y":Infinity}'])
def test_arguments_that_could_not_be_written_again_are_refused(model: ServedModel, arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(ApiError, match=r"arguments must be JSON with finite numbers$"):
        _prompt(model, _PLAIN, [_QUESTION, {"role": "assistant", "tool_calls": calls}])


def test_a_template_for_tools_says_whether_calls_can_be_read(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": _PLAIN, "tokenizer.chat_template.tool_use": _HERMES}
    path = write_tiny_llama(tmp_path / "named.gguf", byte_level_vocabulary() | named)
    assert ServedModel.open(path, "named", ()).calls_tools


@pytest.mark.parametrize(
    ("vocabulary", "named", "text"),
    [
        (byte_level_vocabulary, True, "<|im_start|>|<|im_end|>"),
        (byte_level_vocabulary, False, "|"),
        (sentencepiece_vocabulary, False, "<s>|</s>"),
    ],
)
def test_a_token_that_the_file_does_not_name_has_no_text(
    tmp_path: Path, vocabulary: Any, named: bool, text: str
) -> None:
    tokens = vocabulary() | {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}{{ messages[0].content }}"}
    unnamed = {} if named else {"tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__eos_token_id": None}
    path = write_tiny_llama(tmp_path / "tokens.gguf", tokens, **unnamed)
    with GGUFFile.open(path) as file:
        template = ChatTemplate.from_metadata(file.metadata, Tokenizer.from_metadata(file.metadata).vocabulary)
    assert template.render([_QUESTION]) == text + "the cat"
