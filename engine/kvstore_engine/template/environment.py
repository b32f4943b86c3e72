"""Compiles a chat template and runs it.

The module owns the Jinja environment. Templates come out of downloaded files, so they run sandboxed, get nothing from
the machine but the time, and cannot change their inputs.

The environment (trimmed blocks, `raise_exception`, `tojson`, `strftime_now`, loop controls, `generation`) is the one of
Hugging Face `transformers`, with which template authors test.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvstore_engine.errors import UsageError
from kvstore_proto.version import pip_install

if TYPE_CHECKING:
    from jinja2.ext import Extension
    from jinja2.parser import Parser

Message = Mapping[str, Any]
_MOST_STEPS = 1 << 20  # of all the `range`s of one rendering; the sandbox bounds each, not one within another


class TemplateError(UsageError):
    """An error: a model has no usable chat template, or the template refuses the messages. `param` is the field of the
    chat request at fault. If the template left out a part of the conversation, `prompt` is the prompt that lacks that
    part, otherwise None.
    """

    def __init__(self, message: str, param: str = "messages", prompt: str | None = None) -> None:
        super().__init__(message)
        self.param, self.prompt = param, prompt


class CompiledTemplate:
    """A compiled chat template. `words` is the set of field names and quoted texts in its source, `variables` the set
    of names that it reads. `closes_thoughts` is true if "</think>" is in the source.
    """

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        """Compile the Jinja template `source`. `now` is the clock of the template's function `strftime_now`. Raises
        TemplateError if `source` is not a valid template, or if Jinja is not installed.
        """
        try:
            from jinja2 import TemplateError as JinjaError
            from jinja2 import nodes
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise TemplateError(f"chat templates need Jinja: {pip_install('engine')}") from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["range"] = self._range
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._steps = 0
        self._failures: tuple[type[Exception], ...] = (
            JinjaError, TypeError, ValueError, LookupError, AttributeError, ZeroDivisionError,
        )  # fmt: skip
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except JinjaError as error:
            raise TemplateError(f"the model's chat template cannot be compiled: {_line(error)}") from None
        self.closes_thoughts = "</think>" in source
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.words = frozenset(attributes | texts)
        self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt that the template makes of `variables`, its inputs by name. Raises TemplateError, whose
        message is one line, if the template refuses these inputs or fails.
        """
        self._steps = 0
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise TemplateError(_line(error)) from None
        except (OverflowError, MemoryError, RecursionError) as error:
            raise TemplateError(f"the model's chat template runs out of bounds: {type(error).__name__}") from None
        except self._failures as error:
            raise TemplateError(f"the model's chat template refuses these messages: {_line(error)}") from None

    def _range(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._steps += len(steps)
        if self._steps > _MOST_STEPS:
            raise OverflowError("too many steps")
        return steps


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raise(message: str) -> None:
    raise TemplateError(f"the model's chat template refuses these messages: {message}")


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
    """Return the extension for `{% generation %}...{% endgeneration %}`, which marks text for training; here its
    content is kept unchanged.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = frozenset(["generation"])  # type: ignore[assignment]  # Jinja reads it and never writes it

        def parse(self, parser: "Parser") -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
