"""For any damage to a GGUF file's header, the reader returns a file or raises GGUFError."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_engine.gguf import GGUFError, GGUFFile
from tests.reference.gguf_bytes import write_gguf

_SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small valid file; its last byte belongs to a tensor."""
    metadata = {"general.architecture": "llama", "l.list": ["one", "two"], "l.count": 3, "l.on": True}
    tensors = {"blk.0.w": (0, (4, 2), bytes(32)), "out": (2, (32, 1), bytes(range(18)))}
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "sound.gguf", metadata, tensors)
    return path.read_bytes().rstrip(b"\0")


@pytest.mark.slow
def test_truncation_at_any_byte_is_a_gguf_error(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound)
    GGUFFile.open(path).close()
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        with pytest.raises(GGUFError):
            GGUFFile.open(path)


@_SETTINGS
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_never_raise_anything_else(sound: bytes, tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(sound)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with GGUFFile.open(path) as file:
            for name, info in file.tensors.items():
                assert file.tensor_bytes(name).size == info.nbytes
    except GGUFError as error:
        assert "\n" not in str(error).replace(str(path), "")
