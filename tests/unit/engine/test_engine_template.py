"""Chat templates: rendered as `transformers` renders them, sandboxed, and refused in one line."""

import pytest

from kvstore_engine.template import ChatTemplate, TemplateError

_MESSAGES = [{"role": "system", "content": "be <brief>"}, {"role": "user", "content": "hi"}]


def test_renders_messages_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n    [{{ m.role }}] {{ m['content'] }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source, bos_token="<s>")
    # Trimmed and left-stripped blocks, no HTML escaping.
    assert template.render(_MESSAGES) == "<s>    [system] be <brief>\n    [user] hi\n[assistant]"
    assert template.render(_MESSAGES[1:], add_generation_prompt=False) == "<s>    [user] hi\n"


def test_functions_that_templates_rely_on() -> None:
    source = (
        "{% for m in messages %}{{ m | tojson }}{% if loop.index0 == 1 %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    shown = '{"role": "system", "content": "be <brief>"}{"role": "user", "content": "hi"}4'
    assert ChatTemplate(source).render(_MESSAGES) == shown


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "refuses these messages"),
        ("{% for %}", "cannot be compiled"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(999999999) | list }}", "refuses these messages|out of bounds"),
    ],
)
def test_a_template_that_misbehaves_is_refused(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        ChatTemplate(source).render(_MESSAGES)


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*plain prompt"):
        ChatTemplate.from_metadata({})


@pytest.mark.parametrize("message", [{"role": "wizard", "content": "x"}, {"role": "user"}, {}])
def test_a_message_without_role_or_text_is_refused(message: dict[str, str]) -> None:
    with pytest.raises(TemplateError, match="a message needs a role"):
        ChatTemplate("x").render([message])
