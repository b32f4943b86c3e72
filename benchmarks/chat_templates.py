"""Compares prompts of chat templates with the prompts of llama.cpp's server and of Transformers, to the character.

    benchmarks/chat_templates.py --templates DIR
    benchmarks/chat_templates.py --templates DIR --no-llama --json

Every `*.jinja` below DIR is given eight conversations. Published templates are
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
import copy
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

from support.report import progress

sys.path.insert(0, str(Path(__file__).parent.parent))
from kvstore_engine.server.chat import ChatMessage
from kvstore_engine.template import ChatTemplate, TemplateError
from tests.reference.make_gguf import TinyModel, write_model  # needs the line above

LLAMA, TRANSFORMERS, BOTH, LEFT_OUT, DIFFERS = KINDS = (
    "equal to llama.cpp", "equal to Transformers", "refused by both", "left out", "differs",
)  # fmt: skip
_AROUND = 40  # characters before and after a difference
BOS, EOS = "<|im_start|>", "<|im_end|>"  # those of the model that llama.cpp's server is given
_SECONDS = 300
_SERVE = "import sys, chat_templates; chat_templates.serve(*sys.argv[1:])"
Json = dict[str, Any]
Conversation = tuple[list[Json], list[Json] | None]
"""Messages, and the tools that are offered."""
_PARTS = [{"type": "text", "text": "Part one"}, {"type": "text", "text": "Part two"}]


def compare(
    template: ChatTemplate, conversation: Conversation, references: dict[str, Collection[str]]
) -> tuple[str, str]:
    """Return the kind of our prompt, and why, where it is equal to none of theirs.

    `references` has the prompts of each that was asked, by the kind of a prompt that is equal: none where it refuses.
    """
    messages, tools = conversation
    try:
        given = [ChatMessage.model_validate(message).for_template() for message in messages]
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


def transformers_prompts(source: str, conversation: Conversation) -> set[str]:
    """Return the prompts of a conversation in its forms.

    Calls have objects or texts, content is null or empty, and the template is told to think or nothing; llama.cpp's
    server tells most of them.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    prompts = set()
    for as_object, empty, told in product((True, False), (None, ""), ({}, {"enable_thinking": True})):
        messages, tools = copy.deepcopy(conversation)
        for message in messages:
            if message["content"] is None:
                message["content"] = empty
            for call in message.get("tool_calls", []) if as_object else []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            rendered, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=True,
                bos_token=BOS,
                eos_token=EOS,
                **told,
            )
        except Exception:  # a template may fail in any way: that form is refused
            continue
        prompts.add(rendered[0])
    return prompts


def llama_prompts(model: Path, template: Path) -> dict[str, str]:
    """Return llama.cpp's prompt of each conversation that it does not refuse; none if it does not take the template."""
    command = [sys.executable, "-c", _SERVE, str(model), str(template)]
    folder = Path(__file__).parent
    ended = subprocess.run(command, capture_output=True, timeout=_SECONDS, cwd=folder, check=False)
    lines = ended.stdout.splitlines()
    return dict(json.loads(lines[-1])) if ended.returncode == 0 and lines else {}


def serve(model: str, template: str) -> None:
    """Print the prompts of llama.cpp's own server for `template`, and end this process."""
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path, wanted.chat_template = model, Path(template).read_text(encoding="utf-8")
    wanted.n_ctx, wanted.ui, wanted.warmup, wanted.use_jinja, wanted.verbosity = 256, False, False, True, -1
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(wanted)
    address = f"{server.listening_address}/apply-template"
    prompts = {name: _ask(address, messages, tools) for name, (messages, tools) in CONVERSATIONS.items()}
    print(json.dumps({name: prompt for name, prompt in prompts.items() if prompt is not None}), flush=True)
    os._exit(0)  # the server's threads would be waited for


def _ask(address: str, messages: list[Any], tools: list[Any] | None) -> str | None:
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(json.load(answer)["prompt"])
    except urllib.error.HTTPError:
        return None


def _tool(name: str, argument: str) -> Json:
    properties = {argument: {"type": "string", "description": f"The {argument}"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": parameters}}


def _calls(*calls: tuple[str, str], content: str | None = None, **more: str) -> Json:
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def _result(number: int, content: str, **more: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content, **more}


def _said(role: str, content: Any, **more: str) -> Json:
    return {"role": role, "content": content, **more}


_WEATHER, _TIME = _tool("get_weather", "city"), _tool("get_time", "zone")
CONVERSATIONS: dict[str, Conversation] = {
    "plain": ([_said("user", "What is this?")], None),
    "turns": (
        [
            _said("system", "Be brief, élan."),
            _said("user", "First <question>"),
            _said("assistant", "First answer"),
            _said("user", "Second question"),
        ],
        None,
    ),
    "parts": ([_said("user", _PARTS)], None),
    "tools": ([_said("user", "Weather in Rome?")], [_WEATHER, _TIME]),
    "call": (
        [
            _said("user", "Weather in Rome?"),
            _calls(("get_weather", '{"city": "Rome", "days": 2}')),
            _result(0, "sunny, 31"),
        ],
        [_WEATHER],
    ),
    "parallel": (
        [
            _said("system", "Be brief."),
            _said("user", "Weather in Rome, time in UTC?"),
            _calls(("get_weather", '{"city": "Rome"}'), ("get_time", '{"zone": "UTC"}')),
            _result(0, "sunny, 31", name="get_weather"),
            _result(1, "12:30", name="get_time"),
            _said("assistant", "Sunny; half past noon."),
            _said("user", "And in Oslo?"),
        ],
        [_WEATHER, _TIME],
    ),
    "reasoning": (
        [
            _said("user", "First question"),
            _said("assistant", "First answer", reasoning_content="a long thought"),
            _said("user", "Second question"),
        ],
        None,
    ),
    "agent": (
        [
            _said("user", "Weather in Rome?"),
            _calls(
                ("get_weather", '{"city":"Rome","near":[1,2.5,null,true]}'),
                content="Let me look.",
                reasoning_content="it must be looked up",
            ),
            _result(0, '{"sky": "clear"}'),
        ],
        [_WEATHER],
    ),
}


if __name__ == "__main__":
    raise SystemExit(main())
