"""A name stands for one identity: one name each, kept over restarts, in use only after it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstored.clients.tenants import Peer, TenantDirectory
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.reach import follow_users
from kvstored.config import TenantSection
from kvstored.store.blocks import Residency


def test_two_names_never_stand_for_one_identity(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    assert keyring.identity_of("ml") == "ml"
    keyring.bind("research", "ml")
    assert keyring.identity_of("research") == "ml" and keyring.identity_of("ml") is None
    with pytest.raises(RuntimeError, match="is the identity of 'research'"):
        keyring.bind("other", "ml")
    fresh = keyring.claim("ml")
    assert fresh not in ("ml", "research") and keyring.claim("ml") == fresh
    keyring.bind("research", "research")
    assert keyring.identity_of("research") == "research" and keyring.identity_of("ml") == fresh, "for good"


def test_names_outlive_the_process_once_they_are_settled(tmp_path: Path) -> None:
    before = Keyring(tmp_path)
    before.settle()
    before.bind("alice", "uid-7")
    assert Keyring(tmp_path).identity_of("alice") == "alice"
    before.settle()
    after = Keyring(tmp_path)
    assert after.bound() == {"alice": "uid-7"} and after.secret == before.secret
    after.release("alice")
    after.settle()
    assert Keyring(tmp_path).bound() == {}


def test_keys_are_those_of_the_identity_and_a_user_without_one_is_refused(tmp_path: Path) -> None:
    plain = TenantDirectory(tmp_path, (), "by-uid")
    user = plain.resolve(Peer(1, 7, 7))
    assert user is not None
    keyring = Keyring(tmp_path)
    keyring.bind("alice", "uid-7")
    renamed = TenantDirectory(tmp_path, (TenantSection("alice", uids=(7,)),), "by-uid", keyring)
    alice = renamed.resolve(Peer(1, 7, 7))
    assert alice is not None and (alice.name, alice.digest, alice.secret) == ("alice", user.digest, user.secret)
    without = TenantDirectory(tmp_path, (TenantSection("alice", uids=(8,)),), "by-uid", keyring)
    assert without.resolve(Peer(1, 7, 7)) is None and without.named("uid-7") is None
    assert without.resolve(Peer(1, 8, 8)) is None and without.named("alice") is None, "before follow_users"


def test_what_cannot_be_written_down_is_not_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    keyring = Keyring(tmp_path)
    keyring.bind("alice", "uid-7")
    directory = TenantDirectory(tmp_path, (TenantSection("alice", uids=(8,)),), "by-uid", keyring)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("kvstored.clients.tenants.keyring.replace_file", full)
        follow_users(directory, Residency(("host",)))
    assert keyring.bound() == {"alice": "uid-7"} and directory.resolve(Peer(1, 8, 8)) is None
    follow_users(directory, Residency(("host",)))
    assert keyring.bound() == {} == Keyring(tmp_path).bound()
    alice = directory.resolve(Peer(1, 8, 8))
    assert alice is not None and alice.name == "alice"
