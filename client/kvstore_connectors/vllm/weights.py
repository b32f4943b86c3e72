"""A digest of a model's weights, by content: two checkpoints that differ in one value never share a block.

Owns which files count, how they are hashed and where results are remembered. Files in a Hugging Face cache are named by
their sha256 already, and that name is used; others are read once with xxh3 (as fast as the page cache gives them) and
remembered by path, size, inode and time of change. Never does: download anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from kvstore_client.json_file import write_json
from kvstore_client.paths import cache_directory
from kvstore_connectors.weight_files import WeightFiles, why_unknown

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def weights_digest(location: Path, memory: Path | None = None) -> str:
    """Of a checkpoint's folder or file. "" when it holds no weights. `memory`: the file that remembers digests."""
    return combined_digest(weight_files(location), memory)


def weight_files(location: Path) -> list[Path]:
    """The files of the first kind in `PATTERNS` that is there: a folder may hold the same weights in several."""
    if location.is_file():
        return [location]
    for pattern in PATTERNS:
        found = sorted(location.glob(pattern))
        if found:
            return found
    return []


def loaded_others(files: Iterable[Path], began: float) -> str:
    """Return why a process that `began` then (Unix time) may have loaded other bytes than `files` have; empty if not.

    vLLM copies weights, so that what is in a file later does not matter. Those in a Hugging Face cache are named by
    their content, and are as young as their download.
    """
    outside = [file for file in files if not _is_named_by_content(file.resolve())]
    with closing(WeightFiles(outside)) as opened:
        return why_unknown(opened, [], began)


def combined_digest(files: Iterable[Path], memory: Path | None = None) -> str:
    """Of files, by name and content; "" for none."""
    lines = [f"{file.name}:{_file_digest(file, memory)}" for file in files]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest() if lines else ""


def default_memory() -> Path:
    """`weights.json` in the cache directory."""
    return cache_directory() / "weights.json"


def _file_digest(file: Path, memory: Path | None) -> str:
    real = file.resolve()
    if _is_named_by_content(real):
        return real.name
    state = real.stat()
    slot = f"{real}:{state.st_size}:{state.st_ino}:{state.st_mtime_ns}:{state.st_ctime_ns}"
    known = _remembered(memory)
    if slot in known:
        return known[slot]
    with closing(WeightFiles([real])) as files:
        digest = files.digest()
        if files.changed():
            raise ValueError(f"{file} was written to while it was digested: start the engine again")
    _remember(memory, slot, digest)
    return digest


def _is_named_by_content(real: Path) -> bool:
    return real.parent.name == "blobs" and _SHA256_NAME.fullmatch(real.name) is not None


def _remembered(memory: Path | None) -> dict[str, str]:
    if memory is None:
        return {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(memory.read_text())
        if isinstance(known, dict):
            return {str(slot): str(digest) for slot, digest in known.items()}
    return {}


def _remember(memory: Path | None, slot: str, digest: str) -> None:
    if memory is not None:
        write_json(memory, {**_remembered(memory), slot: digest})
