"""Digests of weights: by content, remembered while nothing changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvstore_connectors.vllm.model import combined_digest, weight_files, weights_digest


def test_same_content_same_digest_in_every_directory(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"one" if name != "c" else b"two")
    digests = [weights_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_only_the_preferred_kind_counts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = weights_digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same weights again")
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(tmp_path) == before
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]


def test_names_of_shards_count(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    before = weights_digest(tmp_path)
    first.rename(tmp_path / "0.safetensors")
    second.rename(first)
    assert weights_digest(tmp_path) != before


def test_no_weights_no_digest(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) == ""
    assert combined_digest([]) == ""


def test_a_single_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    assert weights_digest(file) == weights_digest(tmp_path)


def test_a_hub_cache_names_its_files_by_content(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("ab" * 32)).write_bytes(b"not read")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blobs / ("ab" * 32))
    before = weights_digest(snapshot)
    (blobs / ("ab" * 32)).write_bytes(b"other bytes under the same name")
    assert weights_digest(snapshot) == before


def test_a_known_file_is_not_read_again_and_a_changed_one_is(tmp_path: Path) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "cache" / "weights.json"
    file.write_bytes(b"one")
    first = weights_digest(tmp_path, memory)
    remembered = json.loads(memory.read_text())
    (slot,) = remembered
    memory.write_text(json.dumps({slot: "told by memory"}))
    assert weights_digest(tmp_path, memory) not in (first, "")
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert weights_digest(tmp_path, memory) not in (first, "")
    assert len(json.loads(memory.read_text())) == 2


def test_a_damaged_memory_is_ignored(tmp_path: Path) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "weights.json"
    file.write_bytes(b"one")
    memory.write_text("{ not JSON")
    assert weights_digest(tmp_path, memory) == weights_digest(tmp_path)
