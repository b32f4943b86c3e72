"""The secret behind all root keys, and the identity of each tenant's name.

The module owns STATE/secret, STATE/identity.json and its copy in the NVMe directory (see kvstore_proto.state_identity).
Digests and keys of a tenant are made of its identity: mostly its name, but blocks follow a tenant that gets another
name. A secret that is not the blocks' own is refused. The module drops no block: it reports what is out of reach.
Invariants: no two names have one identity; a name's identity is on the medium before anything is stored under it; a new
secret is on the medium before a check value of it, and the state's own check value is written last, so that a crash in
between ends in a refusal or in the former state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

from kvstore_proto.replaced_file import remove_leftover
from kvstore_proto.state_identity import (
    IDENTITY_FILE,
    SECRET_BYTES,
    SECRET_FILE,
    Identity,
    Ownership,
    read_ownership,
    secret_check,
)
from kvstore_tiers import failpoints
from kvstore_tiers.replaced_file import replace_file
from kvstored.config import ConfigError
from kvstored.unsaved import RETRY_S, Unsaved

log = logging.getLogger(__name__)
failpoints.declare("keyring.secret-written", "a new secret is in place, no check value of it is")
failpoints.declare("keys.written", "the keys at rest are replaced, the place of the former file is not overwritten")
failpoints.declare("keyring.nvme-marked", "the NVMe directory has the check value of the secret, the state has not")


class Keyring:
    """The daemon's secret, and the identity (a fixed name) of each tenant name, kept over restarts. The keys of a
    tenant's blocks are made from the secret and its identity.

    `dram_is_lost` and `nvme_is_lost` say that the secret does not reach the blocks there any more; drop them before
    `settle`. The constructor raises OSError, and ConfigError for a secret that is not the one of the blocks, unless
    `new_secret` is set."""

    def __init__(
        self,
        state_dir: Path,
        nvme_dir: Path | None = None,
        *,
        new_secret: bool = False,
        given: bytes | None = None,
        unsaved: Unsaved | None = None,
    ) -> None:
        """Read or make the secret. `given`: the secret to use, a cluster's."""
        self._unsaved = unsaved or Unsaved()
        self._writing = threading.Lock()
        self._is_behind = False
        found = read_ownership(state_dir, nvme_dir)
        if given is not None and found.secret != given:
            has_blocks = found.secret is not None or bool(found.problem)
            if has_blocks and not new_secret:
                raise ConfigError(
                    f"cluster.secret_file is not the secret that the blocks of {state_dir} were stored under: restore "
                    "the file, take the setting out, or run `kvstored serve --new-secret` once, which drops the blocks"
                )
            _write_secret(state_dir, given)
            failpoints.hit("keyring.secret-written")
            found = Ownership(given, {}, "", dram_is_lost=has_blocks, nvme_is_lost=has_blocks)
            new_secret = False
        if found.problem and not new_secret:
            raise ConfigError(found.problem)
        if new_secret and not found.problem:
            log.info("--new-secret: %s is the secret of the blocks, nothing is dropped", state_dir / SECRET_FILE)
        self._directories = [path for path in (nvme_dir, state_dir) if path is not None]  # in the order of writing
        self.dram_is_lost, self.nvme_is_lost = found.dram_is_lost, found.nvme_is_lost
        self._identities = found.tenants
        self._names = {identity: name for name, identity in found.tenants.items()}
        self._kept = self._latest = found.tenants  # on the medium, and to be there
        self._has_new_secret = found.secret is None
        if found.secret is not None:
            self.secret = found.secret
        else:
            self.secret = os.urandom(SECRET_BYTES)
            _write_secret(state_dir, self.secret)
            failpoints.hit("keyring.secret-written")

    def identity_of(self, name: str) -> str | None:
        """Return the identity of the tenant `name`. Return None if another tenant has `name` as its identity."""
        bound = self._identities.get(name)
        if bound is not None:
            return bound
        return None if name in self._names else name

    def holder(self, identity: str) -> str | None:
        """Return the tenant name that was given `identity` instead of its own name, or None if there is no such
        name."""
        return self._names.get(identity)

    def bound(self) -> dict[str, str]:
        """Return a dictionary from tenant name to identity, for the names whose identity is not the name itself."""
        return dict(self._identities)

    def claim(self, name: str) -> str:
        """Return the identity of the tenant `name`. If it has none, it gets a new one, under which nothing was ever
        stored. Call `settle` before blocks are stored.
        """
        found = self.identity_of(name)
        if found is None:
            found = f"{name}/{os.urandom(8).hex()}"  # no name has a slash in it
            self.bind(name, found)
        return found

    def bind(self, name: str, identity: str) -> None:
        """Make `identity` the identity of the tenant `name`, in place of its present one. Call `settle`, which saves
        it, before it is used. Raises RuntimeError if another name has this identity."""
        if self._names.get(identity, name) != name:
            raise RuntimeError(f"{identity!r} is the identity of {self._names[identity]!r}")
        self.adopt(self.bound_so(name, identity))

    def release(self, name: str) -> None:
        """Undo `bind`: the tenant `name` has its own name as its identity again, unless another tenant has taken that
        meanwhile. Call `settle`, which saves it, before it is used."""
        self.adopt({other: identity for other, identity in self._identities.items() if other != name})

    def bound_so(self, name: str, identity: str) -> dict[str, str]:
        """Return the dictionary that `bound` would return if the tenant `name`, and no other, had `identity`. Save it
        by `write`, then call `adopt`."""
        kept = {other: its for other, its in self._identities.items() if other != name and its != identity}
        return kept if identity == name else {**kept, name: identity}

    def adopt(self, identities: dict[str, str]) -> None:
        self._identities = identities
        self._names = {identity: name for name, identity in identities.items()}

    @property
    def path(self) -> Path:
        return self._directories[-1] / IDENTITY_FILE

    @property
    def is_settled(self) -> bool:
        """True when the identities of all tenant names are saved on the medium."""
        return self._kept == self._identities

    def is_kept(self, name: str) -> bool:
        """Return whether the identity of the tenant `name` is known to be saved on the medium."""
        return not self._is_behind or self._kept.get(name) == self._identities.get(name)

    def settle(self) -> None:
        """Write the identities of all names to the medium. Raises OSError."""
        self.write(self._identities)

    def begin(self) -> None:
        """Save the tenants' identities at the start of the daemon. If that fails and the secret is not new, the daemon
        starts all the same: tenants whose identities are not saved are closed until `run` has saved them. Raises
        OSError under a new secret."""
        try:
            self.settle()
        except OSError as error:
            if self._has_new_secret:
                raise
            self._latest, self._is_behind = self._identities, True
            self._unsaved.failed(
                self.path, error, "an exchanged secret is not noticed, tenants with new names are closed"
            )

    async def run(self) -> None:
        """Try again and again to save identities whose last write has failed. Run it as a task; it never ends by
        itself."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self._is_behind:
                await asyncio.to_thread(self._catch_up)

    def _catch_up(self) -> None:
        with self._writing:
            try:
                self._write(self._latest)
            except OSError as error:
                log.debug("%s cannot be written: %s", self.path, error)

    def write(self, identities: dict[str, str]) -> None:
        """Save `identities`, a dictionary from tenant name to identity, before they are used. It blocks the caller.
        Raises OSError, and then the former file is unchanged."""
        with self._writing:
            self._write(identities)

    def require_room(self) -> None:
        """Write the file of identities once more with its present content, to test that it can be written. It blocks
        the caller. Raises OSError."""
        with self._writing:
            replace_file(self.path, self._content(self._kept))

    def _content(self, identities: dict[str, str]) -> bytes:
        return Identity(secret_check(self.secret), identities).to_bytes()

    def _write(self, identities: dict[str, str]) -> None:
        content, failed = self._content(identities), []
        for directory in self._directories:
            path = directory / IDENTITY_FILE
            is_copy = directory != self._directories[-1]
            try:
                if not path.exists() or path.read_bytes() != content:
                    replace_file(path, content)
                else:
                    remove_leftover(path)
            except OSError as error:
                if not is_copy:
                    raise
                failed.append((path, error))
            else:
                self._unsaved.saved(path)
            if is_copy:
                failpoints.hit("keyring.nvme-marked")
        for path, why in failed:  # only now: without the other one, nothing has changed
            self._unsaved.failed(path, why, f"if {self.path} is lost, renamed tenants lose what they stored")
        self._kept = self._latest = identities
        self._is_behind = bool(failed)


def _write_secret(state_dir: Path, secret: bytes) -> None:
    """Write the secret. Raises OSError: no key is made of a secret that a restart would not find."""
    path = state_dir / SECRET_FILE
    try:
        replace_file(path, secret)
    except OSError as error:
        reason = (
            f"{error.strerror}: a new secret has to be written before anything is stored under it; make room there, or "
            "set daemon.state_dir to another place"
        )
        raise OSError(error.errno, reason, str(path)) from None
