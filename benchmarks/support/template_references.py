"""What others make of a chat template and a conversation: Transformers in this process, llama.cpp's server in a child.

    python -m support.template_references MODEL TEMPLATE

Owns the forms in which Transformers is given a conversation: it has no rule for them, so its callers choose. The
prompts of llama.cpp are those of its own server's `/apply-template`, out of the wheel `xllamacpp`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from itertools import product
from pathlib import Path
from typing import Any

from support.template_conversations import CONVERSATIONS, Conversation

BOS, EOS = "<|im_start|>", "<|im_end|>"  # those of the model that llama.cpp's server is given
_SECONDS = 300


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
    command = [sys.executable, "-m", "support.template_references", str(model), str(template)]
    folder = Path(__file__).parent.parent
    ended = subprocess.run(command, capture_output=True, timeout=_SECONDS, cwd=folder, check=False)
    lines = ended.stdout.splitlines()
    return dict(json.loads(lines[-1])) if ended.returncode == 0 and lines else {}


def _serve(model: str, template: str) -> dict[str, str]:
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path, wanted.chat_template = model, Path(template).read_text(encoding="utf-8")
    wanted.n_ctx, wanted.ui, wanted.warmup, wanted.use_jinja, wanted.verbosity = 256, False, False, True, -1
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(wanted)
    address = f"{server.listening_address}/apply-template"
    prompts = {name: _ask(address, messages, tools) for name, (messages, tools) in CONVERSATIONS.items()}
    return {name: prompt for name, prompt in prompts.items() if prompt is not None}


def _ask(address: str, messages: list[Any], tools: list[Any] | None) -> str | None:
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(json.load(answer)["prompt"])
    except urllib.error.HTTPError:
        return None


if __name__ == "__main__":
    print(json.dumps(_serve(*sys.argv[1:])), flush=True)
    os._exit(0)  # the server's threads would be waited for
