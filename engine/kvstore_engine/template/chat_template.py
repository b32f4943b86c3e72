"""A model's chat template: turns a list of messages into the prompt text the model was trained on.

Owns which of a model's templates is asked, and the promise that what was said is in the prompt: a message, a call or a
tool that its template leaves out is refused. It never tokenises; a rendered prompt is encoded with `parse_special=True`
and, as templates write their own BOS, with `add_special=False`.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from kvstore_engine.template.environment import CompiledTemplate, Message, TemplateError
from kvstore_engine.template.forms import Forms, shown_tools
from kvstore_engine.template.marks import Marks
from kvstore_engine.template.probe import probe
from kvstore_engine.tokenizer.vocabulary import CONTROL, Vocabulary

_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"
_ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_BE_BARE = ("assistant", "tool")
"""Roles whose messages may have no content: calls alone, an answer that was empty, a tool that returns nothing."""
_OWN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """The chat template of one model; compiled, and asked what it reads, when first used."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is another template for requests with tools, `now` the clock that templates may show."""
        self.source, self.tool_source = source, tool_source or source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], vocabulary: Vocabulary | None = None) -> "ChatTemplate":
        """Return the file's templates: the default one, and the one named `tool_use` for requests with tools.

        A file with one of them has it for both; TemplateError for a file with neither. `vocabulary` has the texts of
        the special tokens.
        """
        found = [value for key in (_KEY, _TOOL_KEY) if isinstance(value := metadata.get(key), str) and value.strip()]
        if not found:
            raise TemplateError(
                f"the model has no chat template ({_KEY} is missing): "
                "it may be a base model; give a plain prompt instead"
            )
        bos, eos = (_special_text(metadata, name, vocabulary) for name in ("bos", "eos"))
        return cls(found[0], bos, eos, tool_source=found[-1])

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for `messages` (OpenAI's form), ready for the assistant's turn.

        Content is a text or a list of text parts; an assistant's message and a tool's may have none. `tools`
        (OpenAI's form) are passed to the template, which has to show them to the model. `variables` are what one
        family's templates read, such as Qwen3's `enable_thinking`. TemplateError says what is refused.
        """
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in _ROLES or not (isinstance(content, str | list) or (content is None and role in MAY_BE_BARE)):
                raise TemplateError(
                    f"a message needs a role ({', '.join(_ROLES)}) and a text as content, got {message!r}"
                )
        compiled, forms = self._for_tools if tools else self._for_messages
        given = {
            **self._defaults(compiled),
            **(variables or {}),
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
        }

        def prompt_of(said: Sequence[Message], offered: list[dict[str, Any]]) -> str:
            return compiled.render({**given, "messages": forms.arrange(said), "tools": offered or None})

        shown = shown_tools(tools or [])
        prompt = prompt_of(messages, shown)
        marks = Marks()
        marks.check(prompt_of(marks.conversation(messages), marks.tools(shown)), prompt)
        return prompt

    def prepare(self) -> None:
        """Compile and try the templates now, rather than at the first prompt. TemplateError for one that is broken."""
        _ = self._for_messages, self._for_tools

    def reads(self, variable: str, *, with_tools: bool) -> bool:
        """Does a template, the one for requests with tools or the other, read `variable`, which a caller may set?"""
        compiled, _ = self._for_tools if with_tools else self._for_messages
        return variable in compiled.variables and variable not in _OWN

    def _defaults(self, compiled: CompiledTemplate) -> dict[str, object]:
        """Return what a request may set and llama.cpp's server otherwise gives: the day, and leave to think.

        Files in GGUF are tried with that server, and some close the thoughts of a model that was not asked to think.
        """
        now = self._now()
        days = {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        return {**days, "enable_thinking": True} if compiled.closes_thoughts else {**days}

    @cached_property
    def _for_messages(self) -> tuple[CompiledTemplate, Forms]:
        return self._probed(self.source)

    @cached_property
    def _for_tools(self) -> tuple[CompiledTemplate, Forms]:
        return self._for_messages if self.tool_source == self.source else self._probed(self.tool_source)

    def _probed(self, source: str) -> tuple[CompiledTemplate, Forms]:
        compiled = CompiledTemplate(source, self._now)

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
            return compiled.render({**self._defaults(compiled), **self._tokens, **given})

        return compiled, probe(render, compiled.words)


def _special_text(metadata: Mapping[str, object], name: str, vocabulary: Vocabulary | None) -> str:
    """Return the text of the `name` token: none where the file names none and an ordinary token stands in for it."""
    token = None if vocabulary is None else {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}[name]
    if vocabulary is None or token is None:
        return ""
    named = f"tokenizer.ggml.{name}_token_id" in metadata
    return vocabulary.tokens[token] if named or vocabulary.kinds[token] == CONTROL else ""
