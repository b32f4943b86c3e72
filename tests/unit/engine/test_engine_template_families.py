"""The chat templates of the supported families, in excerpts: rendered right, and as `transformers` does."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvstore_engine.template import ChatTemplate, TemplateError

Messages = Sequence[Mapping[str, Any]]

_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_MISTRAL = (
    "{%- set ns = namespace(index=0) %}"
    '{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}'
    "{{- bos_token }}{%- for message in messages %}"
    '{%- if message["role"] == "user" %}'
    "{%- if tools is not none and (message == user_messages[-1]) %}[AVAILABLE_TOOLS][{%- for tool in tools %}"
    '{%- for key, val in tool.function.items() if key != "return" %}{{- key + "=" + val|string }};{%- endfor %}'
    '{%- endfor %}][/AVAILABLE_TOOLS]{%- endif %}{{- "[INST]" + message["content"] + "[/INST]" }}'
    "{%- set ns.index = ns.index + 1 %}{%- else %}{{- message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}{{- ns.index }}"
)
_QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" %}{%- continue %}{%- endif %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
{{- ns.last }}"""
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_SMOLLM = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% set seen = 1 %}{% endgeneration %}{% else %}{{ message.content }}|{% endif %}{% endfor %}"
    "{{ seen is defined }}"
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
)
_FAMILIES = {
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "qwen": _QWEN,
    "gemma": _GEMMA,
    "phi3": _PHI3,
    "smollm": _SMOLLM,
}
_TURNS: Messages = [
    {"role": "user", "content": " What <is> it? "},
    {"role": "assistant", "content": "<think>hm</think>\nA café."},
    {"role": "user", "content": "Sure?"},
]
_SYSTEM: Messages = [{"role": "system", "content": "be brief"}, *_TURNS]
_WEATHER = {"name": "weather", "description": "tells it", "parameters": {"type": "object"}}
_TOOLS = [{"type": "function", "function": _WEATHER}]


def _render(family: str, messages: Messages, generation: bool = True, **given: Any) -> str:
    return ChatTemplate(_FAMILIES[family], "<s>", "</s>").render(messages, generation, **given)


@pytest.mark.parametrize(
    ("family", "messages", "text"),
    [
        (
            "llama2",
            _SYSTEM,
            "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\n What <is> it? [/INST] <think>hm</think>\nA café. </s>"
            "<s>[INST] Sure? [/INST]",
        ),
        ("mistral", _TURNS, "<s>[INST] What <is> it? [/INST]<think>hm</think>\nA café.</s>[INST]Sure?[/INST]2"),
        (
            "qwen",
            _SYSTEM,
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n What <is> it? <|im_end|>\n"
            "<|im_start|>assistant\nA café.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n3",
        ),
        (
            "gemma",
            _SYSTEM,
            "<s><start_of_turn>user\nbe brief\n What <is> it?<end_of_turn>\n<start_of_turn>model\n<think>hm</think>\n"
            "A café.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "phi3",
            _SYSTEM,
            "<|system|>\nbe brief<|end|>\n<|user|>\n What <is> it? <|end|>\n<|assistant|>\n<think>hm</think>\nA café."
            "<|end|>\n<|user|>\nSure?<|end|>\n<|assistant|>\n",
        ),
        ("smollm", _TURNS[:2], ' What <is> it? |<think>hm</think>\nA café.False{"a":[1,2],"b":"\\u00e9"}'),
    ],
)
def test_a_conversation(family: str, messages: Messages, text: str) -> None:
    assert _render(family, messages) == text


def test_llama3s_date_tools_and_calls() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages = [
        *_TURNS[:1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = _render("llama3", messages, tools=_TOOLS, variables={"date_string": "1 Jan 2030"})
    assert json.dumps(_TOOLS[0], indent=4) in text
    assert "Today Date: 1 Jan 2030<|eot_id|>" in text
    assert '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>' in text
    assert text.endswith('\n\n"sunny"<|start_header_id|>assistant<|end_header_id|>\n\n')
    assert "Today Date: " in _render("llama3", _TURNS)


def test_mistrals_tools_stand_before_the_last_question() -> None:
    text = _render("mistral", _TURNS, tools=_TOOLS)
    shown = "[AVAILABLE_TOOLS][name=weather;description=tells it;parameters={'type': 'object'};][/AVAILABLE_TOOLS]"
    assert f"</s>{shown}[INST]Sure?" in text


def test_qwen3s_thinking_can_be_turned_off() -> None:
    assert _render("qwen", _TURNS, variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n2")


def test_variables_cannot_replace_the_messages() -> None:
    assert _render("phi3", _TURNS, variables={"messages": [], "eos_token": "x"}) == _render("phi3", _TURNS)


@pytest.mark.parametrize(
    ("family", "messages", "complaint"), [("gemma", _SYSTEM[::2], "no system"), ("llama2", _TURNS[1:], "alternate")]
)
def test_what_a_template_refuses_is_said(family: str, messages: Messages, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        _render(family, messages)


@pytest.mark.parametrize(
    ("family", "tools"), [*((family, None) for family in _FAMILIES), ("llama3", _TOOLS), ("mistral", _TOOLS)]
)
def test_transformers_renders_the_same(family: str, tools: list[dict[str, Any]] | None) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    for generation in (True, False):
        (theirs,), _ = reference.render_jinja_template(
            [_TURNS],
            tools=tools,
            chat_template=_FAMILIES[family],
            add_generation_prompt=generation,
            bos_token="<s>",
            eos_token="</s>",
            date_string="today",
        )
        assert _render(family, _TURNS, generation, tools=tools, variables={"date_string": "today"}) == theirs
