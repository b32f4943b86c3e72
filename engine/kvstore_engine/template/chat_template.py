"""A model's chat template: it turns a list of messages into the form of prompt that the model was trained on.

The module chooses among a model's templates, and promises that the whole conversation is in the prompt: a message, a
call or a tool that its template leaves out is refused. It does not tokenise; a rendered prompt is encoded with
`parse_special=True` and, as templates write their own BOS, with `add_special=False`.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from kvstore_engine.template.environment import CompiledTemplate, Message, TemplateError
from kvstore_engine.template.forms import Forms, probe, shown_tools
from kvstore_engine.tokenizer.vocabulary import CONTROL, Vocabulary

Json = dict[str, Any]
_KEY = "tokenizer.chat_template"
_TOOL_KEY = "tokenizer.chat_template.tool_use"
_ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_BE_BARE = ("assistant", "tool")
"""Roles whose messages may have no content: calls alone, an answer that was empty, a tool that returns nothing."""
_OWN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class Marks:
    """A checker that every part of a conversation reaches the prompt that a chat template makes. It puts marks into the
    messages and then looks for them in the prompt.

    A mark is a word that occurs in no text. It is put at both ends of every text, at the end of every name of a tool,
    and into the arguments of every call. A template that shows a text shows its ends, also if it trims or escapes it.
    An answer has a mark at its end only, since templates cut thoughts off its head. A text with white space alone needs
    no mark. A template may leave out a text beside tool calls, as many do, but not the calls.
    """

    def __init__(self) -> None:
        self._stem = f"kvq{secrets.randbits(64)}n"  # in no text but by a guess
        self._places: dict[str, tuple[str, str]] = {}  # by mark

    def conversation(self, messages: Sequence[Message]) -> list[Json]:
        """Return a copy of `messages` with a mark (a word that occurs nowhere else) in each text and each tool call.
        `check` looks for these marks in the prompt.
        """
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def tools(self, tools: Sequence[Message]) -> list[Json]:
        """Return a copy of `tools` with a mark (a word that occurs nowhere else) at the end of each tool's name.
        `check` looks for these marks in the prompt.
        """
        return [
            {**tool, "function": self._named(tool["function"], f"tools[{index}]", "tools")}
            for index, tool in enumerate(tools)
        ]

    def check(self, marked: str, prompt: str) -> None:
        """Raise TemplateError if a mark that `conversation` or `tools` made is missing in `marked`, the prompt of the
        marked conversation: the chat template left that part out. `prompt` is the prompt of the unmarked conversation,
        which the error carries.
        """
        shown = set(re.findall(rf"{self._stem}\d+e", marked))
        for mark, (place, param) in self._places.items():
            if mark not in shown:
                hint = '; leave tools out, or send tool_choice "none"' if param == "tools" else ""
                raise TemplateError(
                    f"{place} does not reach the prompt: the model's chat template leaves it out{hint}", param, prompt
                )

    def _message(self, message: Message, place: str) -> Json:
        calls, content = message.get("tool_calls"), message.get("content")
        if calls:
            marked = [
                {**call, "function": self._called(call["function"], f"{place}.tool_calls[{index}]")}
                for index, call in enumerate(calls)
            ]
            return {**message, "tool_calls": marked}
        if isinstance(content, list):
            parts = [
                {**part, "text": self._text(part["text"], f"{place}.content[{index}]", message["role"])}
                for index, part in enumerate(content)
            ]
            return {**message, "content": parts}
        return {**message, "content": self._text(content or "", place, message["role"])}

    def _text(self, text: str, place: str, role: str) -> str:
        if not text.strip():
            return text
        head = "" if role == "assistant" else self._mark(place, "messages")
        return head + text + self._mark(place, "messages")

    def _called(self, function: Json, place: str) -> Json:
        """Mark a call's arguments, or the name if it has none: some templates show an id in place of the name."""
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not arguments or not isinstance(arguments, dict):
            marked = self._named(function, place, "messages")
            mark = marked["name"].removeprefix(function["name"])
            return {**marked, "arguments": {mark: mark}} if isinstance(arguments, dict) else marked
        mark = self._mark(place, "messages")
        return {**function, "arguments": {**arguments, mark: mark}}

    def _named(self, function: Json, place: str, param: str) -> Json:
        return {**function, "name": function["name"] + self._mark(place, param)}

    def _mark(self, place: str, param: str) -> str:
        mark = f"{self._stem}{len(self._places)}e"
        self._places[mark] = (place, param)
        return mark


class ChatTemplate:
    """The chat template of one model, which turns a list of messages into a prompt. It is compiled on first use."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Make a template of the Jinja text `source`. `tool_source` is another template for requests with tools (None:
        the same one). `bos_token` and `eos_token` are the texts of these tokens, and `now` is the clock whose date
        templates may show.
        """
        self.source, self.tool_source = source, tool_source or source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], vocabulary: Vocabulary | None = None) -> "ChatTemplate":
        """Return the chat template in a GGUF file's `metadata`: the default one, and the one for requests with tools if
        there is one. `vocabulary` gives the texts of special tokens. Raises TemplateError if the file has none.
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
        """Return the prompt for `messages` in OpenAI's form. With `add_generation_prompt` it ends where the assistant's
        answer begins.

        A message's content is a text or a list of text parts; an assistant's or a tool's message may have none.
        `tools`, in OpenAI's form, are given to the template, which has to show them to the model. `variables` are
        inputs of one family's templates, such as Qwen3's `enable_thinking`. Raises TemplateError if the template
        refuses the messages or leaves a part of them out.
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
        """Compile and try the template now rather than at the first prompt. Raises TemplateError if it cannot be
        compiled.
        """
        _ = self._for_messages, self._for_tools

    def reads(self, variable: str, *, with_tools: bool) -> bool:
        """Return True if a request may set `variable` and the template uses it. With `with_tools` the template for
        requests with tools is meant.
        """
        compiled, _ = self._for_tools if with_tools else self._for_messages
        return variable in compiled.variables and variable not in _OWN

    def _defaults(self, compiled: CompiledTemplate) -> dict[str, object]:
        """Return values that a request may set and llama.cpp's server sets by default: the day, and permission to
        think.

        GGUF files are tried with that server, and some templates close the thoughts of a model that was not asked to
        think.
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
    """Return the text of the `name` token; "" if the file names none and an ordinary token stands in for it."""
    token = None if vocabulary is None else {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}[name]
    if vocabulary is None or token is None:
        return ""
    named = f"tokenizer.ggml.{name}_token_id" in metadata
    return vocabulary.tokens[token] if named or vocabulary.kinds[token] == CONTROL else ""
