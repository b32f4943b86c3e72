"""A template is given the form that it reads: stand-ins of what published templates do, and what they must make."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from kvstore_engine.template import ChatTemplate, TemplateError

Json = dict[str, Any]
_TURN = "{% for m in messages %}[{{ m.role }}]"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SHOWN = "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(',') }};{% endif %}"
_LOOP = "{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
_EITHER = (
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def _said(role: str, *texts: str, **more: Any) -> Json:
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": content, **more}


def _called(*arguments: object, content: str | None = None, **more: Any) -> Json:
    calls = [
        {"id": f"call{number}", "type": "function", "function": {"name": "f", "arguments": given}}
        for number, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def _render(source: str, messages: Sequence[Json], **more: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **more)


@pytest.mark.parametrize(
    ("source", "message", "text"),
    [
        (_TURN + _LOOP, _said("user", "ab"), "[user]<ab>"),
        (_TURN + _LOOP, _said("user", "a", "b"), "[user]<a><b>"),
        (_TURN + _EITHER, _said("user", "ab"), "[user]ab"),
        (_TURN + _EITHER, _said("user", "a", "b"), "[user]<a><b>"),
        (_TURN + "{{ m.content }}{% endfor %}", _said("user", "a", "b"), "[user]a\nb"),
        (_TURN + "{{ m.content | trim }}{% endfor %}", _said("user", "a", "b"), "[user]a\nb"),
        (_TURN + "{{ m.content | tojson }}{% endfor %}", _said("user", "a", "b"), '[user]"a\\nb"'),
        (_TURN + "{{ '-' + m.content + '-' }}{% endfor %}", _said("user", "a", "b"), "[user]-a\nb-"),
        (_TURN + "{{ m.content[0].text }}{% endfor %}", _said("user", "a", "b"), "[user]a\nb"),
        (
            _TURN + "{{ (m.content | selectattr('type', 'equalto', 'text') | first).text }}{% endfor %}",
            _said("user", "ab"),
            "[user]ab",
        ),
    ],
)
def test_content_is_a_text_or_parts(source: str, message: Json, text: str) -> None:
    assert _render(source, [message]) == text


def test_each_role_has_its_own_form() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}<{{ part.text }}>{% endfor %}"
        "{% else %}{{ m.role[0] + ':' + m.content }}{% endif %}{% endfor %}"
    )
    messages = [_said("system", "s", "t"), _said("user", "q"), _said("assistant", "a"), _said("user", "r", "u")]
    assert _render(source, messages) == "s:s\nt<q>a:a<r><u>"


_CALLS = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}:"
_CALLS_END = ";{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("shown", "given", "text"),
    [
        ("{{ '=' + c.function.arguments }}", '{"a":1.50}', '={"a":1.50}'),
        ("{{ c.function.arguments }}", '{"a":1.50}', '{"a":1.50}'),
        ("{{ '=' + c.function.arguments }}", {"a": "é"}, '={"a": "é"}'),
        ("{{ c.function.arguments | tojson }}", '{"a":"é"}', '{"a": "é"}'),
        ("{{ c.function.arguments | tojson }}", {"a": [1, None]}, '{"a": [1, null]}'),
        (
            "{{ c | tojson }}",
            '{"a":1}',
            '{"id": "call0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        ),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}", '{"a":1,"b":"x"}', "a=1,b=x,"),
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}"
            "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
            '{"a":1}',
            '{"a": 1}',
        ),
        ("{{ c.function.arguments | tojson }}", "", "{}"),
    ],
)
def test_arguments_are_an_object_or_a_text(shown: str, given: object, text: str) -> None:
    prompt = _render(_CALLS + shown + _CALLS_END, [_said("user", "q"), _called(given), _said("tool", "r")])
    assert prompt == f"q;f:{text};r;"


def test_a_message_of_calls_alone_has_an_empty_text_or_null_or_nothing() -> None:
    empty = (
        "{% for m in messages %}{{ m.content + '|' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    assert _render(empty, [_said("user", "q"), _called("{}")]) == 'q||{"name": "f", "arguments": {}}'
    null = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
        "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    assert _render(null, [_said("user", "q"), _called('{"a":1}'), _said("tool", "r")]) == 'q|f{"a":1}r|'
    absent = (
        "{% for m in messages %}{% if 'content' in m %}{{ m.content }}|"
        "{% else %}{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}"
    )
    assert _render(absent, [_said("user", "q"), _called("{}")]) == 'q|{"name": "f", "arguments": {}}'


def test_calls_that_show_by_their_id_alone_are_shown() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.id }}>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    assert _render(source, [_said("user", "q"), _called("{}", '{"a":1}')]) == 'q<call0>{}<call1>{"a": 1}'


@pytest.mark.parametrize(
    ("read", "given", "text"),
    [
        ("reasoning_content", "reasoning_content", "(t)a"),
        ("reasoning_content", "reasoning", "(t)a"),
        ("reasoning", "reasoning_content", "(t)a"),
        ("thinking", "reasoning_content", "(t)a"),
        ("thinking", "thinking", "(t)a"),
        ("name", "name", "(t)a"),
        ("tool_plan", "tool_plan", "(t)a"),
        ("tool_plan", "reasoning_content", "a"),
    ],
)
def test_other_fields_reach_a_template_that_reads_them(read: str, given: str, text: str) -> None:
    source = "{% for m in messages %}{% if m.READ is string %}({{ m.READ }}){% endif %}{{ m.content }}{% endfor %}"
    source = source.replace("READ", read)
    assert _render(source, [_said("user", "q"), _said("assistant", "a", **{given: "t"})]) == "q" + text


_REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
_SKIPPING = "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"


@pytest.mark.parametrize("source", [_REFUSING, _SKIPPING])
def test_without_a_system_role_the_first_question_has_the_systems_text(source: str) -> None:
    turns = [_said("user", "q"), _said("assistant", "a")]
    assert _render(source, [_said("system", "be brief"), *turns]) == "user:be brief\nq;assistant:a;"
    assert _render(source, [_said("developer", "be", "brief"), *turns]) == "user:be\nbrief\nq;assistant:a;"
    assert _render(source, turns) == "user:q;assistant:a;"
    with pytest.raises(TemplateError, match="no system message, and no user's message follows"):
        _render(source, [_said("system", "be brief"), *turns[1:]])


def test_a_developers_message_is_a_systems_unless_the_template_knows_it() -> None:
    plain = _TURN + "{{ m.content }}{% endfor %}"
    assert _render(plain, [_said("developer", "d"), _said("user", "q")]) == "[system]d[user]q"
    dropping = (
        "{% for m in messages %}{% if m.role != 'developer' %}{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"
    )
    assert _render(dropping, [_said("developer", "d"), _said("user", "q")]) == "system:duser:q"
    knowing = "{% for m in messages %}{{ '!' if m.role == 'developer' else '?' }}{{ m.content }}{% endfor %}"
    assert _render(knowing, [_said("developer", "d"), _said("user", "q")]) == "!d?q"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("{{ messages[-1].content }}", r"messages\[0\]"),
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endif %}{% endfor %}",
            r"messages\[2\]",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", r"messages\[1\]\.tool_calls\[0\]"),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] }}{% endif %}{% endfor %}",
            r"messages\[1\]\.tool_calls\[1\]",
        ),
        (
            "{% for m in messages %}{{ m.tool_calls }}{% if 'b' not in m.content %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            r"messages\[3\]",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused(source: str, place: str) -> None:
    messages = [_said("user", "a"), _called("{}", "{}"), _said("tool", "r"), _said("user", "b")]
    with pytest.raises(TemplateError, match=f"^{place} does not reach the prompt: .*leaves it out$"):
        _render(source, messages)


@pytest.mark.parametrize("shown", ["{{ m.content.split('\\n')[-1] }}", "{{ m.content.split('</think>')[-1] }}"])
def test_a_question_without_its_head_is_refused_and_an_answer_without_its_thoughts_is_not(shown: str) -> None:
    source = _TURN + shown + "{% endfor %}"
    with pytest.raises(TemplateError, match=r"^messages\[0\] does not reach the prompt"):
        _render(source, [_said("user", "what is\n</think> for?")])
    assert _render(source, [_said("user", "q"), _said("assistant", "<think>t\n</think>a")])[-1] == "a"


def test_a_call_without_its_arguments_is_refused() -> None:
    source = _TURN + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"^messages\[1\].tool_calls\[0\] does not reach the prompt"):
        _render(source, [_said("user", "q"), _called('{"a":1}')])
    assert _render(source, [_said("user", "q"), _called("{}")]) == "[user]q[assistant]f"


def test_a_part_that_is_left_out_is_refused() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{% if 'x' not in part.text %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content\[1\] does not reach"):
        _render(source, [_said("user", "a", "x")])


def test_what_a_template_does_to_a_text_is_its_own_affair() -> None:
    source = (
        "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}"
        "{% set text = text.split('</think>')[-1] %}{% endif %}{{ text | trim | tojson }}{% endfor %}"
    )
    messages = [_said("user", '  "q"\n'), _said("assistant", "<think>t</think>\n\na"), _said("user", " ")]
    assert _render(source, messages) == '"\\"q\\"""a"""'
    beside = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    assert _render(beside, [_said("user", "q"), _called("{}", content="I look.")]).startswith('q[{"id": "call0"')


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    plain = _TURN + "{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match=r'^tools\[0\] does not reach .* send tool_choice "none"$') as error:
        _render(plain, [_said("user", "f")], tools=[_TOOL])
    assert error.value.param == "tools"
    assert _render(_SHOWN + plain, [_said("user", "f")], tools=[_TOOL]) == "f;[user]f"
    # Some show them beside the last question alone.
    last = (
        "{% for m in messages %}{% if loop.last and m.role == 'user' %}"
        + _SHOWN
        + "{% endif %}{{ m.content }}{% endfor %}"
    )
    assert _render(last, [_said("user", "q")], tools=[_TOOL]) == "f;q"
    with pytest.raises(TemplateError, match="tools"):
        _render(last, [_said("user", "q"), _said("assistant", "a")], tools=[_TOOL])


def test_a_tool_has_a_name_a_description_and_parameters_in_this_order() -> None:
    source = "{{ tools | tojson }}{{ messages[0].content }}"
    function = {"strict": False, "parameters": None, "name": "f"}
    shown = '[{"type": "function", "function": {"name": "f", "description": "", "parameters": {}, "strict": false}}]q'
    assert _render(source, [_said("user", "q")], tools=[{"type": "function", "function": function}]) == shown


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_answer_and_a_result_may_be_empty(role: str) -> None:
    source = _TURN + "{{ m.content + ';' }}{% endfor %}"
    assert _render(source, [_said("user", "q"), {"role": role, "content": None}]) == f"[user]q;[{role}];"
    with pytest.raises(TemplateError, match="a text as content"):
        _render(source, [{"role": "user", "content": None}])


def test_a_template_that_fails_without_tools_is_tried_with_one() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + _TURN + _LOOP
    source = "{{ tools[0].type }}:" + source
    messages = [_said("system", "s"), _said("user", "q")]
    assert _render(source, messages, tools=[_TOOL]) == "function:f;[system]<s>[user]<q>"


def test_the_template_for_tools_is_asked_for_its_own_forms() -> None:
    metadata = {
        "tokenizer.chat_template": _TURN + "{{ m.content }}{% endfor %}",
        "tokenizer.chat_template.tool_use": _SHOWN + _TURN + _LOOP,
    }
    template = ChatTemplate.from_metadata(metadata)
    assert template.render([_said("user", "q")]) == "[user]q"
    assert template.render([_said("user", "q")], tools=[_TOOL]) == "f;[user]<q>"
    del metadata["tokenizer.chat_template"]
    assert ChatTemplate.from_metadata(metadata).render([_said("user", "q")]) == "[user]<q>"


def test_the_day_comes_from_the_clock_that_is_given() -> None:
    source = "{{ date_string }}|{{ datetime }}|{{ strftime_now('%H:%M') }}{{ messages[0].content }}"
    template = ChatTemplate(source, now=lambda: datetime(2031, 7, 4, 12, 30))
    assert template.render([_said("user", "q")]) == "04 Jul 2031|Jul 04 2031|12:30q"
    assert template.render([_said("user", "q")], variables={"date_string": "today"}) == "today|Jul 04 2031|12:30q"


@pytest.mark.parametrize(
    ("source", "text", "asked"),
    [
        (
            "{{ messages[0].content }}{{ '<think>' if enable_thinking else '<think></think>' }}",
            "<think>",
            "<think></think>",
        ),
        ("{{ messages[0].content }}{{ '<|channel>' if enable_thinking }}", "", ""),
    ],
)
def test_a_template_that_would_close_thoughts_leaves_them_open_unless_it_is_asked(
    source: str, text: str, asked: str
) -> None:
    assert _render(source, [_said("user", "q")]) == "q" + text
    assert _render(source, [_said("user", "q")], variables={"enable_thinking": False}) == "q" + asked


def test_variables_that_a_caller_may_set_are_those_that_the_template_reads() -> None:
    template = ChatTemplate(
        "{{ enable_thinking }}{{ messages }}", tool_source="{{ documents }}{{ messages }}{{ tools }}"
    )
    names = ("enable_thinking", "documents", "messages", "bos_token")
    assert [template.reads(name, with_tools=False) for name in names] == [True, False, False, False]
    assert [template.reads(name, with_tools=True) for name in names] == [False, True, False, False]


def test_a_refusal_has_one_line() -> None:
    with pytest.raises(TemplateError, match=r"^the model's chat template refuses these messages: no such thing$"):
        _render("{{ raise_exception('no\n  such\n\nthing') }}", [_said("user", "q")])


@pytest.mark.slow
def test_ranges_within_ranges_have_an_end() -> None:
    with pytest.raises(TemplateError, match="out of bounds"):
        _render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", [_said("user", "q")])
