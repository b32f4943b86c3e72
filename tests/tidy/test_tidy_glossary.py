"""The glossary holds each of the project's words once, and public names use its words, not their synonyms."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

import kvstore_client
from kvctl import main as kvctl
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.tidy.tree import ROOT, documents

MOST_WORDS = 62
# Identifiers with a banned word that means something else in them, and what.
_OTHER_MEANING = {"pages": "Store.pages: places in staging, counted in pages of 4096 bytes"}
# What names of verbs and results may consist of beside words of the glossary: plain English.
_PLAIN = {
    "array", "bench", "by", "close", "config", "connect", "contains", "daemon", "delete", "deleted", "doctor", "drain",
    "drop", "error", "explain", "flush", "invalidate", "ping", "release", "reload", "report", "shutdown",
    "statistics", "status", "top", "traced", "versions", "wake", "weights",
}  # fmt: skip
_ROW = re.compile(r"^\| \*\*(.+?)\*\*(?:, ([^|]*?))? \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)
_NAME = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")


@dataclass(frozen=True, slots=True)
class Word:
    """One row of the glossary."""

    word: str
    forms: tuple[str, ...]
    meaning: str
    not_called: tuple[str, ...]


def glossary(text: str) -> list[Word]:
    return [
        Word(word, tuple(filter(None, forms.split(", "))), meaning, tuple(filter(None, banned.split(", "))))
        for word, forms, meaning, banned in _ROW.findall(text)
    ]


def repeated(words: Iterable[Word]) -> list[str]:
    """Words, forms or bans that are in the glossary more than once."""
    names = Counter(name for word in words for name in (word.word, *word.forms, *word.not_called))
    return [name for name, times in names.items() if times > 1]


def parts(name: str) -> list[str]:
    """`KVStoreError`, `load_us`, `STORE_STATUS_AGAIN`: the words in them, lower case, without a plural's s."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word.lower() for word in re.split(r"[_-]", split) if word]


def banned_names(names: Iterable[str], words: Iterable[Word]) -> list[str]:
    """Names that use a synonym, each with the word to use."""
    instead = {form: word.word for word in words for banned in word.not_called for form in _inflections(banned)}
    return [
        f"{name}: say {instead[part]}, not {part}"
        for name in sorted(set(names) - set(_OTHER_MEANING))
        for part in parts(name)
        if part in instead
    ]


def foreign_names(names: Iterable[str], words: Iterable[Word]) -> list[str]:
    """Names without any word of the glossary that are not plain English either."""
    known = {
        inflected
        for word in words
        for form in (word.word, *word.forms)
        for inflected in _inflections(form.replace("-", " ").split()[0])
    }
    return sorted(name for name in set(names) if not (known | _PLAIN) & set(parts(name)))


def _inflections(word: str) -> set[str]:
    stem = word.removesuffix("e")
    return {word, f"{word}s", f"{word}es", f"{stem}ed", f"{stem}ing", *({f"{word[:-1]}ies"} if word[-1] == "y" else ())}


def _text() -> str:
    return (ROOT / "docs/glossary.md").read_text()


def _kvctl_help(*arguments: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        kvctl.main([*arguments, "--help"])
    return text.getvalue()


def _subcommands() -> set[str]:
    return set(re.findall(r"^    ([a-z]+)(?: |$)", _kvctl_help(), re.MULTILINE))


def _options() -> set[str]:
    return {
        option
        for command in _subcommands()
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", _kvctl_help(command))
    }


def _wire_names() -> Iterator[str]:
    """Every name in the messages, without comments and without the names that are reserved because they are gone."""
    for path in sorted((ROOT / "proto/kvstore_proto/v1").glob("*.proto")):
        text = re.sub(r"//.*|^\s*reserved .*$|^import .*$|^package .*$", "", path.read_text(), flags=re.MULTILINE)
        yield from _NAME.findall(text)


def _api_names() -> Iterator[str]:
    """Headings, attributes, functions and their parameters in the API reference; not its prose."""
    text = runpy.run_path(str(ROOT / "docs/make_api.py"))["page"]()
    yield from re.findall(r"^(?:### |\*\*)(\w+)", text, re.MULTILINE)
    for signature in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield signature.partition("(")[0].strip()
        yield from re.findall(r"[(,]\s*\**(\w+)\s*[:=,)]", signature)


def _verbs_and_results() -> set[str]:
    methods = (name for name in dir(kvstore_client.Session) if not name.startswith("_"))
    callables = {name for name in methods if callable(getattr(kvstore_client.Session, name))}
    requests = {field.name for field in wire.Request.DESCRIPTOR.oneofs_by_name["op"].fields}
    return callables | requests | _subcommands() | set(kvstore_client.__all__)


def test_each_word_is_defined_once_and_there_are_few() -> None:
    words = glossary(_text())
    rows = [line for line in _text().splitlines() if line.startswith("|")]
    assert len(words) == len(rows) - 2, "a row of the table is no `| **word**, form | meaning | synonyms |`"
    assert 40 < len(words) <= MOST_WORDS
    assert repeated(words) == []
    assert [word.word for word in words] == sorted((word.word for word in words), key=str.lower)
    assert [word.word for word in words if len(re.findall(r"\. ", word.meaning)) > 1] == [], "one or two sentences"


def test_no_word_is_there_for_nothing() -> None:
    pages = "\n".join(path.read_text() for path in documents() if path.name != "glossary.md").lower()
    assert [word.word for word in glossary(_text()) if not re.search(rf"\b{re.escape(word.word)}", pages)] == []


def test_public_names_use_no_synonym() -> None:
    wire_names, api_names, options = set(_wire_names()), set(_api_names()), _options()
    assert len(wire_names) > 300
    assert len(api_names) > 150
    assert len(options) > 20
    assert banned_names(wire_names | api_names | options | _verbs_and_results(), glossary(_text())) == []
    assert set(_OTHER_MEANING) <= wire_names | api_names | options, "an exception for nothing"


def test_verbs_and_results_are_words_of_the_glossary() -> None:
    names = _verbs_and_results()
    assert {"get", "put", "acquire", "store", "PutReceipt", "quarantine"} <= names
    assert foreign_names(names, glossary(_text())) == []
    assert {part for name in names for part in parts(name)} >= _PLAIN, "plain English that no name has"


def test_what_these_checks_would_find() -> None:
    text = "| **slot** | a place | page, cell |\n| **demote**, demoted | to a slower tier | spill |\n"
    words = glossary(text)
    assert [word.not_called for word in words] == [("page", "cell"), ("spill",)]
    assert banned_names(["free_slots", "demoted_blocks", "pages"], words) == []
    assert banned_names(["SpilledBlocks", "page_count", "PAGE_CODE_FREE"], words) == [
        "PAGE_CODE_FREE: say slot, not page",
        "SpilledBlocks: say demote, not spilled",
        "page_count: say slot, not page",
    ]
    assert foreign_names(["DemotedRun", "slots", "ping", "shelve"], words) == ["shelve"]
    assert repeated(glossary(text + "| **slot** | again | |\n")) == ["slot"]
    assert repeated(glossary(text + "| **cell** | a word that another bans | |\n")) == ["cell"]
