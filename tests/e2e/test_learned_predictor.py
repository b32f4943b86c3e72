"""A daemon that serves with a learned model; its recording, judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvstored.cli import EXIT_OK, main
from kvstored.store.prefetch.model_file import write_model
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.kvctl import Kvctl
from tests.reference.return_model import small_arrays
from tests.reference.running_daemon import running_daemon

MODEL = model()
BLOCKS = 4


def test_a_daemon_predicts_with_a_model_and_its_recording_is_judged(tmp_path: Path, capfdbinary: Any) -> None:
    path, recording = tmp_path / "m.npz", tmp_path / "trace.jsonl.gz"
    write_model(path, small_arrays())
    settings = ("prefetch.enabled=true", "prefetch.predictor=learned", f"prefetch.model={path}")
    with running_daemon(*settings, f"daemon.record={recording}") as daemon:
        with daemon.connect(MODEL) as session:
            for _ in range(3):
                for conversation in range(12):
                    put_conversation(session, conversation, BLOCKS)
                    assert found_blocks(session, conversation, BLOCKS) == BLOCKS
        found = Kvctl(daemon, capfdbinary).json("predictor")
        assert found["predictor"] == "learned" and found["enabled"] and not found.get("failure")
    assert main(["predictor", "evaluate", str(recording), "--model", str(path), "--json"]) == EXIT_OK
    rows = json.loads(capfdbinary.readouterr().out)["rows"]
    assert {row["predictor"] for row in rows} == {"session-return", "learned"}
