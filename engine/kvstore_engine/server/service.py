"""The objects that every endpoint needs: the model as the HTTP process sees it, the engine, the counters.

The module owns the tokenizer and the chat template of one model, and its name for clients. It never loads weights:
`embeddings` does, for what it computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore_engine.gguf import GGUFFile, OpenFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.server import tools
from kvstore_engine.server.api_errors import ApiError, invalid, unknown_model
from kvstore_engine.server.engine_client import EngineClient
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.messages import Int32Array
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.template import ChatTemplate, TemplateError
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.vocabulary import TokenizerError

_LONG_TEXT = 4096  # characters or tokens: what takes over a millisecond to tokenise does so in a thread


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the server answers with, as the HTTP process needs it: names, tokenizer and chat template, but no
    weights. `template` is None for a model that cannot chat. `longest` is the number of bytes of the longest token.
    """

    name: str
    aliases: frozenset[str]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    calls_tools: bool
    call_marks: tools.CallMarks
    longest: int  # bytes of a token
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def open(cls, path: Path | OpenFile, name: str, aliases: tuple[str, ...]) -> ServedModel:
        """Read the tokenizer and the chat template from the model file `path`. `name` and `aliases` are its names for
        clients. Raises GGUFError, UnsupportedModel or TokenizerError.
        """
        with GGUFFile.open(path) as file:
            ModelConfig.from_gguf(file)  # raises for a model that cannot be run
            tokenizer = Tokenizer.from_metadata(file.metadata)
            try:
                template = ChatTemplate.from_metadata(file.metadata, tokenizer.vocabulary)
            except TemplateError:
                template = None
        if template is not None:
            with contextlib.suppress(TemplateError):  # said to each chat
                template.prepare()
        calls_tools = template is not None and tools.understands(template.tool_source)
        others = frozenset({name, file.path.stem, *aliases})
        longest = max(len(tokenizer.piece(token)) for token in range(len(tokenizer.vocabulary.tokens)))
        return cls(name, others, tokenizer, template, calls_tools, tools.CallMarks.of(tokenizer), longest)

    def check_name(self, asked: str | None) -> None:
        """Raise ApiError 404 unless `asked` is one of the model's names or None."""
        if asked is not None and asked not in self.aliases:
            raise unknown_model(asked, self.name)

    async def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Int32Array:
        """Return the token ids of `text`, int32 [n]. With `add_special` the model's begin and end tokens are added.
        With `parse_special` names of control tokens in the text become these tokens. Raises ApiError for text that is
        not Unicode.
        """
        try:
            if len(text) < _LONG_TEXT:
                return self.tokenizer.encode(text, add_special, parse_special)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special, parse_special)
        except TokenizerError as error:
            raise invalid(str(error)) from None

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of the token ids `tokens`, control tokens included."""
        if len(tokens) < _LONG_TEXT:
            return self.tokenizer.decode(tokens, special=True)
        return await asyncio.to_thread(self.tokenizer.decode, tokens, special=True)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least. It is computed from the length of the text alone."""
        return len(text) // self.longest

    def text_of(self, token: int) -> str:
        """Return the text of the token with the id `token`. Bytes that are no whole character become U+FFFD."""
        return self.tokenizer.piece(token).decode(errors="replace")

    def render(
        self,
        messages: list[dict[str, object]],
        tools: list[dict[str, object]] | None,
        variables: Mapping[str, object],
        effort: object = None,
    ) -> str:
        """Return the prompt text that the chat template makes of `messages` and `tools`. `variables` are further inputs
        of the template, `effort` is the request's `reasoning_effort`. Raises ApiError if the model has no template, or
        if the template refuses the messages or leaves a part of them out.
        """
        if self.template is None:
            raise invalid("this model has no chat template: use /v1/completions", "messages")
        try:
            for name in variables:
                if not self.template.reads(name, with_tools=bool(tools)):
                    why = f"chat_template_kwargs.{name} is not read by the model's chat template, or not to be set"
                    raise TemplateError(why, "chat_template_kwargs")
            if effort is not None and self.template.reads("reasoning_effort", with_tools=bool(tools)):
                variables = {"reasoning_effort": effort, **variables}
            return self.template.render(messages, tools=tools, variables=variables)
        except TemplateError as error:
            raise ApiError(400, str(error), param=error.param) from None


class Embeds(Protocol):
    """An object that computes embeddings: see `kvstore_engine.server.embeddings.Embeddings`."""

    async def vectors(self, inputs: Sequence[Int32Array], tenant: str, context: int) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that the HTTP endpoints of one server share: model, engine connection, keys, metrics, embeddings."""

    model: ServedModel
    engine: EngineClient
    keys: KeyRing
    metrics: Metrics
    max_body_bytes: int
    embeddings: Embeds | None = None
    is_draining: asyncio.Event = field(default_factory=asyncio.Event)
