"""A model's chat template: turns a list of messages into the prompt text the model was trained on.

Owns the Jinja environment. Templates come out of downloaded files, so they run sandboxed and cannot change
what they are given. It never tokenises; a rendered prompt is encoded with `parse_special=True` and, as
templates write their own BOS, with `add_special=False`.

The environment (trimmed blocks, `raise_exception`, `tojson`, `strftime_now`, loop controls) is the one
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

Message = Mapping[str, str]

_KEY = "tokenizer.chat_template"
_ROLES = ("system", "user", "assistant", "tool")


class TemplateError(UsageError):
    """The model has no usable chat template, or the template refuses these messages."""


class ChatTemplate:
    """The chat template of one model; compiled when first used."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], bos_token: str = "", eos_token: str = "") -> "ChatTemplate":
        """The file's default template; TemplateError if there is none."""
        source = metadata.get(_KEY)
        if not isinstance(source, str) or not source.strip():
            raise TemplateError(
                f"the model has no chat template ({_KEY} is missing): "
                "it may be a base model; give a plain prompt instead"
            )
        return cls(source, bos_token, eos_token)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` ({"role", "content"} each), ready for the assistant's turn."""
        from jinja2 import TemplateError as JinjaError

        for message in messages:
            if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
                raise TemplateError(
                    f"a message needs a role ({', '.join(_ROLES)}) and a text as content, got {message!r}"
                )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                **self._tokens,
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
        try:
            from jinja2 import TemplateError as JinjaError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise TemplateError("chat templates need Jinja: pip install 'kvstored[engine]'") from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._source)
        except JinjaError as error:
            raise TemplateError(f"the model's chat template cannot be compiled: {error}") from None


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which would put &lt; into prompts.
    return json.dumps(value, ensure_ascii=False, indent=indent)
