"""The committed gRPC code is what the pinned generator makes of the .proto files today."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tidy.tree import PACKAGES, ROOT

_TOOLS = Path(os.environ.get("KVSTORED_PROTO_VENV", ROOT / ".venv-proto"))


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    if not (_TOOLS / "bin/protoc-gen-mypy").exists():
        if os.environ.get("CI"):
            pytest.fail("the pinned protobuf generator could not be installed: see the output of `make proto-check`")
        pytest.skip("pinned protobuf generator not installed (make proto-check installs it)")
    subprocess.run([ROOT / "proto/generate.sh", tmp_path], check=True, capture_output=True, text=True)
    committed = PACKAGES["kvstore_proto"] / "v1"
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvstore_proto/v1").iterdir()}
    assert len(fresh) >= 8
    present = {path.name for path in committed.iterdir() if "_pb2" in path.name}
    assert sorted(present) == sorted(fresh)
    stale = [name for name, text in fresh.items() if (committed / name).read_text() != text]
    assert stale == [], "run `make proto` and commit the result"
