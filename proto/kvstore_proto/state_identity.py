"""The secret that the blocks of a state directory and an NVMe directory depend on.

The daemon's start and doctor read it:

    STATE/secret           32 random bytes; every key starts from them
    STATE/identity.json    a check value of that secret, and the identity of each tenant's name
    NVME/identity.json     a copy

Blocks carry no trace of the secret. If it is lost or exchanged, no key reaches them, and they still take space:
the check value shows it. It is an HMAC of a constant and reveals nothing about the secret.
The module only reads. Invariant: a directory that has no check value yet is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECRET_FILE, IDENTITY_FILE = "secret", "identity.json"
SECRET_BYTES = 32
MAX_IDENTITY_BYTES = 4 << 20
_LABEL = b"kvstore.v1 secret check\0"
_NEW_SECRET = (
    "or run `kvstored serve --new-secret` once, which drops the blocks that no secret reaches and frees their space"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of an identity file, which says to which secret the blocks in a directory belong. `secret_check` is
    a check value of that secret. `tenants` has the identity of each tenant whose name is not its identity.
    """

    secret_check: str
    tenants: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps({"secret_check": self.secret_check, "tenants": self.tenants}, indent=1).encode() + b"\n"


class DamagedIdentity(ValueError):
    """The error of an identity file that exists and cannot be understood. The message is its path."""


class Ownership(NamedTuple):
    """The result of checking that the blocks in a state directory and an NVMe directory belong to the daemon's secret.
    `problem` is one sentence that says why a daemon must not start and what the user can do, or "". `dram_is_lost`
    and `nvme_is_lost` are True if the blocks there can no longer be reached, even if the daemon starts.
    """

    secret: bytes | None  # None: none yet, or none that is whole
    tenants: dict[str, str]
    problem: str
    dram_is_lost: bool
    nvme_is_lost: bool


def secret_check(secret: bytes) -> str:
    return hmac.new(secret, _LABEL, hashlib.sha256).hexdigest()[:32]


def read_ownership(state_dir: Path, nvme_dir: Path | None) -> Ownership:
    """Read the secret and the identity files of a daemon's directories, and return whether the blocks there belong to
    that secret, so that clients can still reach them. `nvme_dir` is None if there is no NVMe tier. Raises OSError.
    """
    raw = _read(state_dir / SECRET_FILE, SECRET_BYTES + 1)
    secret = raw if raw is not None and len(raw) == SECRET_BYTES else None
    check = secret_check(secret) if secret is not None else None
    state, is_damaged = _read_or_damaged(state_dir / IDENTITY_FILE)
    nvme = _read_or_damaged(nvme_dir / IDENTITY_FILE)[0] if nvme_dir is not None else None
    has_slabs = nvme_dir is not None and any((nvme_dir / "slabs").glob("*.slab"))
    ours = [identity for identity in (state, nvme) if identity is not None and identity.secret_check == check]
    is_new = raw is None and state is None and nvme is None and not is_damaged and not has_slabs
    is_unknown = secret is None or (is_damaged and nvme is None)  # whose the blocks are
    found = Ownership(
        secret,
        dict(ours[0].tenants) if ours else {},
        "",
        dram_is_lost=not is_new and (is_unknown or (state not in (None, *ours)) or (is_damaged and not ours)),
        nvme_is_lost=nvme not in (None, *ours) or (nvme is None and has_slabs and is_unknown),
    )
    return found._replace(problem="" if is_new else _problem(found, (state_dir, nvme_dir), raw is None, state, nvme))


def _problem(
    found: Ownership,
    directories: tuple[Path, Path | None],
    has_no_secret: bool,
    state: Identity | None,
    nvme: Identity | None,
) -> str:
    state_dir, nvme_dir = directories
    path = state_dir / SECRET_FILE
    if found.secret is None:
        if has_no_secret:
            return f"{path} is lost, and no block can be reached without it: restore it from a backup, {_NEW_SECRET}"
        return f"{path} is damaged: restore it from a backup, {_NEW_SECRET}"
    if state is not None and state.secret_check != secret_check(found.secret):
        return (
            f"{path} is not the secret that the blocks were stored under: restore that one from a backup, {_NEW_SECRET}"
        )
    if not found.nvme_is_lost:
        return ""
    if nvme is not None:
        return (
            f"{nvme_dir} holds blocks stored under another secret than {path}: restore that one from a backup or set "
            f"nvme.path to this daemon's own directory, {_NEW_SECRET}"
        )
    return (
        f"{state_dir / IDENTITY_FILE} and {nvme_dir}/{IDENTITY_FILE} do not say whose blocks these are: restore them "
        f"from a backup, {_NEW_SECRET}"
    )


def _read_or_damaged(path: Path) -> tuple[Identity | None, bool]:
    try:
        return read_identity(path), False
    except DamagedIdentity:
        return None, True


def read_identity(path: Path) -> Identity | None:
    """Return the identity in the file `path`, or None if there is no such file. Raises OSError, and DamagedIdentity if
    the file cannot be understood.
    """
    raw = _read(path, MAX_IDENTITY_BYTES)
    if raw is None:
        return None
    try:
        document = json.loads(raw)
        check, tenants = document["secret_check"], document["tenants"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedIdentity(str(path)) from None
    if not (isinstance(check, str) and isinstance(tenants, dict)):
        raise DamagedIdentity(str(path))
    if not all(isinstance(text, str) and text.isascii() for text in (*tenants, *tenants.values())):
        raise DamagedIdentity(str(path))
    if len(set(tenants.values())) < len(tenants):
        raise DamagedIdentity(str(path))  # two names would share their blocks
    return Identity(check, tenants)


def _read(path: Path, most_bytes: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(most_bytes)
    except FileNotFoundError:
        return None
