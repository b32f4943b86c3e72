"""A model's chat template: turns a list of messages into the prompt text the model was trained on.

Owns the Jinja environment. Templates come out of downloaded files, so they run sandboxed and cannot change
what they are given. It never tokenises; a rendered prompt is encoded with `parse_special=True` and, as
templates write their own BOS, with `add_special=False`.

The environment (trimmed blocks, `raise_exception`, `tojson`, `strftime_now`, loop controls, `generation`) is the one
Hugging Face `transformers` gives to templates, which is what their authors test against.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvstore_engine.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension
    from jinja2.parser import Parser

Message = Mapping[str, Any]

_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"
_ROLES = ("system", "user", "assistant", "tool")


class TemplateError(UsageError):
    """The model has no usable chat template, or the template refuses these messages."""


class ChatTemplate:
    """The chat template of one model; compiled when first used."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *, tool_source: str | None = None
    ) -> None:
        """`tool_source`: another template for requests with tools."""
        self._source, self._tool_source = source, tool_source or source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], bos_token: str = "", eos_token: str = "") -> "ChatTemplate":
        """The file's default template, and the one for tools if it has one; TemplateError without the default."""
        source, tool_source = metadata.get(_KEY), metadata.get(_TOOL_KEY)
        if not isinstance(source, str) or not source.strip():
            raise TemplateError(
                f"the model has no chat template ({_KEY} is missing): "
                "it may be a base model; give a plain prompt instead"
            )
        return cls(source, bos_token, eos_token, tool_source=tool_source if isinstance(tool_source, str) else None)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` ({"role", "content"} each), ready for the assistant's turn.

        `tools` (OpenAI's form) are passed to the template, which may show them to the model.
        `variables` are those of one family's templates, such as Qwen3's `enable_thinking`. An assistant's
        message may have `tool_calls` instead of a text.
        """
        from jinja2 import TemplateError as JinjaError

        for message in messages:
            text = message.get("content")
            calls = message.get("role") == "assistant" and message.get("tool_calls")
            if message.get("role") not in _ROLES or not (isinstance(text, str) or (text is None and calls)):
                raise TemplateError(
                    f"a message needs a role ({', '.join(_ROLES)}) and a text as content, got {message!r}"
                )
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                {
                    **(variables or {}),
                    **self._tokens,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                    "tools": list(tools) if tools else None,
                }
            )
        except (
            JinjaError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ZeroDivisionError,
        ) as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from None
        except (OverflowError, MemoryError, RecursionError) as error:
            raise TemplateError(f"the model's chat template runs out of bounds: {type(error).__name__}") from None

    @cached_property
    def _template(self) -> "Template":
        return _compiled(self._source)

    @cached_property
    def _tool_template(self) -> "Template":
        return self._template if self._tool_source == self._source else _compiled(self._tool_source)


def _compiled(source: str) -> "Template":
    try:
        from jinja2 import TemplateError as JinjaError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TemplateError("chat templates need Jinja: pip install 'kvstored[engine]'") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except JinjaError as error:
        raise TemplateError(f"the model's chat template cannot be compiled: {error}") from None


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put &lt; into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> "type[Extension]":
    """`{% generation %}...{% endgeneration %}`, which marks what training is to learn: here only its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = frozenset(["generation"])  # type: ignore[assignment]  # Jinja reads it and never writes it

        def parse(self, parser: "Parser") -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
