"""Compares prompts of chat templates with those of llama.cpp's server and of Transformers, to the character.

    benchmarks/chat_templates.py --templates DIR
    benchmarks/chat_templates.py --templates DIR --no-llama --json

Every `*.jinja` below DIR is given eight conversations (support/template_conversations.py). Published templates are
others' text, so none comes with this program. Each prompt is one of:

equal to llama.cpp, equal to Transformers
refused by both      by us and by one of the two, or by both
left out             refused by us alone: the template leaves out a call or a tool, and so do they: one of their
                     prompts is what the template makes of the rest
differs              anything else, with the first place of difference

Below, what is left out has a line for each conversation, with the number of templates. Exit status: 0; 1 when a prompt
differs; 2 for a mistake. Without the wheel `xllamacpp`, or with --no-llama, Transformers alone is asked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from support.report import progress
from support.template_conversations import CONVERSATIONS, Conversation
from support.template_references import BOS, EOS, llama_prompts, transformers_prompts

sys.path.insert(0, str(Path(__file__).parent.parent))
from kvstore_engine.server.chat import Message
from kvstore_engine.template import ChatTemplate, TemplateError
from tests.reference.make_gguf import TinyModel, write_model  # needs the line above

LLAMA, TRANSFORMERS, BOTH, LEFT_OUT, DIFFERS = KINDS = (
    "equal to llama.cpp", "equal to Transformers", "refused by both", "left out", "differs",
)  # fmt: skip
_AROUND = 40  # characters before and after a difference


def compare(
    template: ChatTemplate, conversation: Conversation, references: dict[str, Collection[str]]
) -> tuple[str, str]:
    """Return the kind of our prompt, and why, where it is equal to none of theirs.

    `references` has the prompts of each that was asked, by the kind of a prompt that is equal: none where it refuses.
    """
    messages, tools = conversation
    try:
        given = [Message.model_validate(message).for_template() for message in messages]
        prompt = template.render(given, tools=tools)
    except TemplateError as error:
        if not all(references.values()):
            return BOTH, ""
        is_theirs = any(error.prompt in prompts for prompts in references.values())
        return (LEFT_OUT if is_theirs else DIFFERS), str(error)
    for kind, prompts in references.items():
        if prompt in prompts:
            return kind, ""
    theirs = [one for prompts in references.values() for one in sorted(prompts)[:1]]
    return DIFFERS, " / ".join(_difference(prompt, one) for one in theirs) or "they refuse"


def _difference(ours: str, theirs: str) -> str:
    place = next(
        (place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    begin, end = max(0, place - _AROUND), place + _AROUND
    return f"{ours[begin:end]!r}, theirs {theirs[begin:end]!r}"


def rows_of(path: Path, model: Path | None) -> list[dict[str, Any]]:
    """Return a row for each conversation with the template at `path`; `model` is None without llama.cpp."""
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, BOS, EOS)
    prompts = llama_prompts(model, path) if model is not None else {}
    rows = []
    for name, conversation in CONVERSATIONS.items():
        references: dict[str, Collection[str]] = {TRANSFORMERS: transformers_prompts(source, conversation)}
        if model is not None:
            references = {LLAMA: [prompts[name]] if name in prompts else []} | references
        kind, why = compare(template, conversation, references)
        rows.append({"template": path.stem, "conversation": name, "kind": kind, "why": why})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, required=True, metavar="DIR", help="folder with *.jinja files")
    parser.add_argument("--no-llama", action="store_true", help="ask Transformers alone")
    parser.add_argument("--json", action="store_true", help="the rows as a line of JSON at the end")
    options = parser.parse_args(arguments)
    paths = sorted(options.templates.rglob("*.jinja"))
    if not paths:
        print(f"no *.jinja in {options.templates}", file=sys.stderr)
        return 2
    asks_llama = not options.no_llama and importlib.util.find_spec("xllamacpp") is not None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny.gguf", TinyModel()) if asks_llama else None
        for path in paths:
            progress(path.name)
            rows += rows_of(path, model)
    counts = Counter(row["kind"] for row in rows)
    for row in rows:
        if row["kind"] == DIFFERS:
            print(f"{row['template']}, {row['conversation']}: {row['why']}")
    left_out = Counter((row["conversation"], row["why"].split("[")[0]) for row in rows if row["kind"] == LEFT_OUT)
    for (conversation, first), count in sorted(left_out.items()):
        print(
            f"left out: {first} of the conversation {conversation} by {count} templates, with the references as with us"
        )
    print(f"{len(paths)} templates, {len(rows)} prompts: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    if options.json:
        print(json.dumps(rows))
    return 1 if counts[DIFFERS] else 0


if __name__ == "__main__":
    raise SystemExit(main())
