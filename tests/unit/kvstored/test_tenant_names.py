"""Names of tenants and fingerprints: saved off the control thread, bounded, and no more than labels."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_proto.fingerprint import Fingerprint
from kvstored.clients.tenants import Peer, TenantDirectory, directory, names

PEER = Peer(0, 1234, 1234)


def opened(place: Path) -> TenantDirectory:
    return TenantDirectory(place, (), "by-uid")


def model(number: int, nbytes: int = 10) -> Fingerprint:
    return Fingerprint(f"model {number}", f"{number:0{nbytes}}")


def writing_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Grows by the thread of each write that is made from now on."""
    writers: list[threading.Thread] = []
    real: Callable[[Path, bytes], None] = names.replace_file

    def write(path: Path, content: bytes) -> None:
        writers.append(threading.current_thread())
        real(path, content)

    monkeypatch.setattr(names, "replace_file", write)
    return writers


def test_new_names_are_saved_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = opened(tmp_path)
    writers = writing_threads(monkeypatch)
    digests = [tenants.remember(model(number)) for number in range(100)]
    assert tenants.resolve(PEER) is not None
    assert writers == [], "a hello waits for no disk"

    async def until_saved() -> None:
        task = asyncio.create_task(tenants.run())
        while "uid-1234" not in (tmp_path / "names.json").read_text():
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_saved(), 60))
    tenants.close()
    assert writers and threading.main_thread() not in writers
    later = opened(tmp_path)
    assert set(later.fingerprints()) == set(digests) and [tenant.name for tenant in later.all()] == ["uid-1234"]


def test_what_is_not_saved_at_the_end_is_saved_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = opened(tmp_path)
    writers = writing_threads(monkeypatch)
    digest = tenants.remember(model(1))
    tenants.close()
    tenants.close()
    assert len(writers) == 1 and opened(tmp_path).fingerprint_label(digest).startswith("model 1:")


def test_a_crash_before_it_was_saved_costs_labels_until_the_client_is_back(tmp_path: Path) -> None:
    before = opened(tmp_path)
    tenant = before.resolve(PEER)
    assert tenant is not None
    digest = before.remember(model(1))
    after = opened(tmp_path)
    assert after.fingerprint_label(digest) == digest.hex()[:12]
    assert after.name_of(tenant.digest).startswith("unknown-")
    assert after.fingerprint_digest(after.fingerprint_number(digest)) == digest, "as recovery asks for it"
    again = after.resolve(PEER)
    assert again is not None and again.roots(model(1)) == tenant.roots(model(1)), "keys do not depend on names"
    assert after.name_of(tenant.digest) == "uid-1234"
    after.remember(model(1))
    assert after.fingerprint_label(digest).startswith("model 1:")


def test_a_full_disk_costs_labels_and_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    tenants = opened(tmp_path)
    monkeypatch.setattr(names, "replace_file", full)
    tenants.remember(model(1))
    with caplog.at_level(logging.WARNING):
        tenants.close()
    assert "No space left" in caplog.text


def test_what_is_kept_is_bounded_in_bytes(tmp_path: Path) -> None:
    tenants = opened(tmp_path)
    for number in range(100):
        tenants.remember(model(number, 60_000))
    kept = tenants.fingerprints().values()
    assert 0 < sum(len(fingerprint.canonical()) for fingerprint in kept) <= names.MAX_NAMED_BYTES
    assert len(kept) < 100
    tenants.close()
    assert (tmp_path / "names.json").stat().st_size < names.MAX_NAMED_BYTES * 1.1
    assert len(opened(tmp_path).fingerprints()) == len(kept)


def test_numbers_are_bounded_and_never_name_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_NUMBERED_FINGERPRINTS", 2, raising=False)
    tenants = opened(tmp_path)
    digests = [model(number).digest() for number in range(4)]
    numbers = [tenants.fingerprint_number(digest) for digest in digests]
    assert numbers[:2] == [0, 1] and numbers[2] == numbers[3] not in (0, 1)
    assert [tenants.fingerprint_digest(number) for number in numbers[:2]] == digests[:2]
    assert tenants.fingerprint_digest(numbers[2]) not in digests
    assert tenants.known_number(digests[2]) != numbers[2], "a drop of one of them must not drop the others"
