"""Names of tenants and fingerprints: bounded, known late, and no more than labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_proto.fingerprint import Fingerprint
from kvstored.clients.tenants import Peer, TenantDirectory, directory, names
from tests.reference.blocks import Shelf

PEER = Peer(0, 1234, 1234)


def opened(place: Path) -> TenantDirectory:
    return TenantDirectory(place, (), "by-uid")


def model(number: int, nbytes: int = 10) -> Fingerprint:
    return Fingerprint(f"model {number}", f"{number:0{nbytes}}")


def test_names_come_back_after_the_start_beside_new_ones(tmp_path: Path) -> None:
    before = opened(tmp_path)
    tenant = before.resolve(PEER)
    assert tenant is not None
    digests = [before.remember(model(number)) for number in range(100)]
    shelf = Shelf("host", tenants=0)
    shelf.residency.tenant(tenant.index_name)
    assert all(b"uid-1234" not in key for key, _ in before.named_entries(shelf.residency)), "it has no blocks"
    shelf.store(1)
    entries = before.named_entries(shelf.residency)
    assert entries[0] == (b"tenant:uid-1234", b"") and len(entries) == 101

    after = opened(tmp_path)
    new = after.remember(model(1000))
    assert after.fingerprint_label(digests[1]) == digests[1].hex()[:12]
    assert after.name_of(tenant.digest).startswith("unknown-")
    number = after.fingerprint_number(digests[1])  # as recovery asks for it
    after.know(entries)
    assert after.name_of(tenant.digest) == "uid-1234" and set(after.fingerprints()) == {*digests, new}
    assert number in after.family(model(1))
    again = after.resolve(PEER)
    assert again is not None and again.roots(model(1)) == tenant.roots(model(1)), "keys do not depend on names"


@pytest.mark.parametrize(
    "entry",
    [(b"tenant:\x1b]0;owned", b""), (b"fingerprint:x", b"{}"), (b"fingerprint:x", b"["), (b"", b""), (b"what", b"7")],
)
def test_what_is_no_name_is_left_out(tmp_path: Path, entry: tuple[bytes, bytes]) -> None:
    tenants = opened(tmp_path)
    tenants.know([entry])
    assert tenants.all() == [] and tenants.fingerprints() == {}


def test_a_fingerprint_under_another_digest_is_left_out(tmp_path: Path) -> None:
    before, after = opened(tmp_path), opened(tmp_path)
    before.remember(model(1))
    ((_, text),) = before.named_entries(Shelf("host").residency)
    after.know([(b"fingerprint:" + bytes(32), text)])
    assert after.fingerprints() == {}


@pytest.mark.slow
def test_what_is_kept_is_bounded_in_bytes(tmp_path: Path) -> None:
    tenants = opened(tmp_path)
    for number in range(100):
        tenants.remember(model(number, 60_000))
    entries = tenants.named_entries(Shelf("host").residency)
    assert 0 < sum(len(text) for _, text in entries) <= names.MAX_NAMED_BYTES
    assert len(entries) < 100
    again = opened(tmp_path)
    again.know(entries)
    assert len(again.fingerprints()) == len(entries)


def test_numbers_are_bounded_and_never_name_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_NUMBERED_FINGERPRINTS", 2, raising=False)
    tenants = opened(tmp_path)
    digests = [model(number).digest() for number in range(4)]
    numbers = [tenants.fingerprint_number(digest) for digest in digests]
    assert numbers[:2] == [0, 1] and numbers[2] == numbers[3] not in (0, 1)
    assert [tenants.fingerprint_digest(number) for number in numbers[:2]] == digests[:2]
    assert tenants.fingerprint_digest(numbers[2]) not in digests
    assert tenants.known_number(digests[2]) != numbers[2], "a drop of one of them must not drop the others"
