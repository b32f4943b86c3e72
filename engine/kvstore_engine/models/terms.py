"""The terms of a model, shown before it is downloaded, and the user's agreement to them.

The module owns how terms are shown and asked for. Without a terminal nothing is downloaded: the error names the command
that agrees.
"""

import sys
from collections.abc import Callable
from html.parser import HTMLParser

from kvstore_engine.errors import UsageError
from kvstore_engine.models.known import KnownModel

Agreement = Callable[[KnownModel, str], None]
_HIDDEN, _BREAKING = ("script", "style"), ("p", "li", "h1", "h2", "h3", "h4", "div", "br", "tr")


def plain_text(page: str) -> str:
    """Return the readable text of the HTML `page`, a line for each paragraph, from the first main heading to the end of
    the article. Without a heading it begins at the start of the page.
    """
    start = max(page.find("<h1"), 0)
    end = page.find("</article>", start)
    reader = _Text()
    reader.feed(page[start : end if end >= 0 else len(page)])
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)


def ask_on_terminal(model: KnownModel, text: str) -> None:
    """Print the terms `text` of `model` and ask the user to agree. Raises UsageError if the answer is not yes, or if
    there is no terminal to ask on.
    """
    print(text, file=sys.stderr)
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError(
            f"{model.name} is under the terms above ({model.licence}), and there is no terminal to ask on: "
            f"`kvengine fetch {model.name} --accept-terms` agrees to them and downloads it"
        )
    print(f"{model.name}: do you agree to these terms? [y/N] ", file=sys.stderr, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"{model.name} was not downloaded: its terms were not agreed to")


def agree(model: KnownModel, text: str) -> None:
    """Print the terms `text` of `model`. The user has agreed to them by an option of the command, so nothing is
    asked.
    """
    print(text, file=sys.stderr)
    print(f"{model.name}: you agreed to these terms with --accept-terms", file=sys.stderr)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        if tag in _BREAKING:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data.replace("\n", " "))
