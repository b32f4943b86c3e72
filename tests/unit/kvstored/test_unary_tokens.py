"""The tokens file: who may read it, what each line must be, and that a token finds its own tenant only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvstored.clients.tenants import Peer, TenantDirectory
from kvstored.clients.tenants.tokens import load_tokens, names_in
from kvstored.config import ConfigError, TenantSection
from kvstored.config.private_input import MAX_FILE_BYTES


@pytest.fixture
def directory(tmp_path: Path) -> TenantDirectory:
    return TenantDirectory(tmp_path, (TenantSection("alpha"), TenantSection("beta")), "by-uid")


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def written(tmp_path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "tokens"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_each_token_finds_its_tenant(tmp_path: Path, directory: TenantDirectory) -> None:
    text = f"# who\nalpha {digest('one')}\n\nalpha {digest('two').upper()}  # rotated\nbeta\t{digest('three')}\n"
    tokens = load_tokens(written(tmp_path, text), directory.named)
    assert len(tokens) == 3
    found = {token: tokens.tenant_of(token) for token in ("one", "two", "three", "", "One", digest("one"), "\udcff")}
    assert {token: tenant.name for token, tenant in found.items() if tenant} == {
        "one": "alpha", "two": "alpha", "three": "beta",
    }  # fmt: skip


def test_users_are_tenants_only_where_they_are_by_default(tmp_path: Path, directory: TenantDirectory) -> None:
    by_uid = directory.named("uid-1001")
    assert by_uid is not None and by_uid.name == "uid-1001"
    assert directory.named("uid-01") is None and directory.named("gamma") is None
    strict = TenantDirectory(tmp_path, (TenantSection("alpha"),), "refuse")
    assert strict.named("uid-1001") is None
    assert strict.named("alpha") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lists no token"),
        ("# nothing\n", "lists no token"),
        ("alpha", "line 1: write a tenant's name and the SHA-256"),
        ("alpha secret", "line 1: write a tenant's name and the SHA-256"),
        (f"alpha {digest('x')} more", "line 1: write"),
        (f"alpha {digest('x')[:-1]}", "line 1: write"),
        (f"\ngamma {digest('x')}", "line 2: there is no tenant 'gamma'; list it under [[tenant]]"),
        (f"alpha {digest('x')}\nbeta {digest('x')}", "line 2: the same token as in line 1"),
        (f"alpha {digest('')}", "line 1: this is the SHA-256 of an empty token"),
        (f"alpha {digest(chr(10))}", "line 1: this is the SHA-256 of an empty token"),
        (b"\xff\xfe", "is not text"),
        ("#" * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(
    tmp_path: Path, directory: TenantDirectory, text: str | bytes, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokens(written(tmp_path, text), directory.named)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("unary.tokens_file: ")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, directory: TenantDirectory, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_tokens(written(tmp_path, f"alpha {digest('x')}", mode), directory.named)


def test_a_file_of_another_user_is_refused(tmp_path: Path, directory: TenantDirectory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    path = written(tmp_path, f"alpha {digest('x')}")
    os.chown(path, 4711, 4711)
    with pytest.raises(ConfigError, match="belongs to uid 4711"):
        load_tokens(path, directory.named)


@pytest.mark.parametrize("what", ["directory", "fifo", "nothing"])
def test_what_is_no_file_is_refused(tmp_path: Path, directory: TenantDirectory, what: str) -> None:
    path = tmp_path / "tokens"
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=r"unary\.tokens_file: "):
        load_tokens(path, directory.named)


def test_a_tenant_is_the_same_by_token_and_by_uid(tmp_path: Path) -> None:
    directory = TenantDirectory(tmp_path, (TenantSection("alpha", uids=(77,)),), "refuse")
    by_uid = directory.resolve(Peer(1, 77, 77))
    assert by_uid is directory.named("alpha")


def test_who_has_tokens_is_not_guessed_where_their_file_cannot_be_read(tmp_path: Path) -> None:
    """A user's blocks would follow to a tenant for which others have tokens."""
    with pytest.raises(ConfigError, match="cannot read"):
        names_in(tmp_path / "tokens")
    assert names_in(None) == frozenset()
    assert names_in(written(tmp_path, f"alpha {digest('x')}")) == {"alpha"}
