"""One request of the engine, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct:q8_0"


def generate(system_file: Path, question: str, tokens: int, *arguments: str) -> dict[str, Any]:
    """What `kvengine generate --json` says of `question` after the system prompt in `system_file`, with so many tokens
    of answer. Ends the benchmark where it fails."""
    command = [
        str(Path(sys.executable).with_name("kvengine")), "generate", "--model", MODEL, "--system-file",
        str(system_file), "--prompt", question, "--max-tokens", str(tokens), "--ignore-eos", "--json", "--quiet",
        "--no-stream", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"kvengine failed: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
