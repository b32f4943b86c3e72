"""The secret that the nodes of a cluster share: a file of the operator's, the same on each of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvstore_proto.state_identity import SECRET_BYTES
from kvstored.config import ConfigError
from kvstored.config.private_input import read_private

_SETTING = "cluster.secret_file"


def read_cluster_secret(path: Path | None) -> bytes | None:
    """32 bytes made of the file's content, less white space around it; None where there is no file set. Raises
    ConfigError."""
    if path is None:
        return None
    try:
        content = read_private(_SETTING, path).strip()
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {path}: {error.strerror}") from None
    if len(content) < SECRET_BYTES:
        raise ConfigError(
            f"{_SETTING}: {path} has {len(content)} bytes, at least {SECRET_BYTES} are needed: "
            f"head -c 32 /dev/urandom | base64 > {path}"
        )
    return hashlib.blake2b(content, digest_size=SECRET_BYTES, person=b"kvstore cluster").digest()
