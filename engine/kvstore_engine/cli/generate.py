"""`kvengine generate`: one prompt in, text out.

The module reads prompts, and prints the answer on stdout, everything else on stderr.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from kvstore_console.units import human_bytes, human_seconds
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.cli.restorations import restorations_table
from kvstore_engine.errors import UsageError
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.loaded_model import LoadedModel, LoadOptions, open_model
from kvstore_engine.models.locate import locate
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.sampler import SamplingSettings


def run(options: argparse.Namespace) -> int:
    """Run `kvengine generate`: answer the prompt in `options`, print the text and return exit code 0. Raises UsageError
    or OperationError.
    """
    begin = time.perf_counter()
    # The user's own inputs first: a misspelt file must not wait for a model to load.
    text = _read(options.prompt, options.prompt_file)
    system = _read(options.system, options.system_file) if options.system_file or options.system is not None else None
    settings = RequestSettings(
        max_tokens=options.max_tokens,
        sampling=SamplingSettings(options.temperature, options.top_k, options.top_p, options.seed),
        store=not options.no_store,
        ignore_end=options.ignore_eos,
    )
    path = locate(options.model, sockets=options.kvstore)
    load = LoadOptions(
        options.context,
        options.threads,
        options.kvstore,
        warm_up=not options.no_warm_up,
        device=options.device,
        stages=options.stages,
        whole_blocks=options.whole_blocks,
        hidden_states=not options.no_hidden_states,
        trace=options.trace,
        accepts_lossy=options.accepts_lossy,
        selection=PageSelection.parse(options.select_pages) if options.select_pages is not None else None,
    )
    with open_model(path, load) as model:
        prompt = _prompt(model, text, system, chat=options.chat or system is not None)
        load_s = time.perf_counter() - begin
        generation = model.generator.generate(
            prompt, settings, None if options.no_stream else _print_now, options.next_in
        )
        _report(options, model, generation, load_s)
    return 0


def _print_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt(model: LoadedModel, text: str, system: str | None, *, chat: bool) -> Prompt:
    if not chat:
        return Prompt(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return Prompt(model.chat_template().render(messages), rendered=True)


def _read(text: str | None, path: Path | None) -> str:
    if path is None:
        assert text is not None, "argparse requires one of the two"
        return text
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _report(options: argparse.Namespace, model: LoadedModel, generation: Generation, load_s: float) -> None:
    if options.no_stream:
        sys.stdout.write(generation.text)
    if not generation.text.endswith("\n"):
        sys.stdout.write("\n")
    if options.json:
        answer = {"model": model.name, "load_s": load_s, **generation.as_json()}
        sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    if not options.quiet:
        print(_summary(generation, load_s, with_store=options.kvstore is not None), file=sys.stderr)
        if any(each.stage is not None for each in generation.restorations):
            print(restorations_table([each.as_json() for each in generation.restorations]), file=sys.stderr)


def _summary(generation: Generation, load_s: float, *, with_store: bool) -> str:
    timings = generation.timings
    parts = [
        f"{generation.prompt_tokens} prompt tokens",
        f"first token after {human_seconds(timings.ttft_s)}",
        f"{len(generation.tokens)} generated ({generation.stop})",
    ]
    if timings.tpot_s:
        parts.append(f"{1 / timings.tpot_s:.1f} tokens/s")
    parts.append(f"loaded in {human_seconds(load_s)}")
    if with_store:
        restore, store = generation.restore, generation.store
        restored = f"{restore.tokens} restored ({human_bytes(restore.bytes)} in {human_seconds(restore.restore_s)})"
        parts.append(restored if restore.tokens else f"0 restored: {restore.reason}")
        parts.append(f"{store.stored} blocks stored" + (f", then {store.reason}" if store.reason else ""))
    return "kvengine: " + "; ".join(parts)
