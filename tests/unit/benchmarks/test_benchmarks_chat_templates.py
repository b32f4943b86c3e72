"""benchmarks/chat_templates.py sorts prompts into equal, refused, left out and different ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parents[3] / "benchmarks" / "chat_templates.py"
_PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
_REFUSING = "{% if messages[1] is defined %}{{ raise_exception('one') }}{% endif %}" + _PLAIN


def _run(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(_PROGRAM), "--templates", str(folder), "--no-llama", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_prompt_has_its_kind(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "refusing.jinja").write_text(_REFUSING)
    ended = _run(tmp_path)
    summary, rows = ended.stdout.splitlines()[-2:]
    # Transformers prints a list of parts as Python writes it; we give the template a text.
    assert summary == (
        "1 templates, 8 prompts: "
        "0 equal to llama.cpp, 1 equal to Transformers, 5 refused by both, 1 left out, 1 differs"
    )
    kinds = {row["conversation"]: row["kind"] for row in json.loads(rows)}
    assert (kinds["plain"], kinds["tools"], kinds["parts"]) == ("equal to Transformers", "left out", "differs")
    assert ended.returncode == 1


@pytest.mark.slow
def test_a_folder_without_templates_is_a_mistake(tmp_path: Path) -> None:
    ended = _run(tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"no *.jinja in {tmp_path}\n"
