"""Certificates of a made-up authority, for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest


@dataclass(frozen=True)
class Certified:
    """The files of a private key and of its certificate."""

    key: Path
    chain: Path


class Authority:
    """An authority whose certificate is the file `chain`; its files are in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._openssl = shutil.which("openssl") or ""
        if not self._openssl:
            pytest.skip("openssl is not installed: no certificate can be made")
        self._directory, self._issued = directory, 0
        self.chain, self._key = directory / "ca.pem", directory / "ca.key"
        self._run("req", "-x509", *self._new_key(self._key), "-days", "2", "-subj", "/CN=authority", "-out", self.chain)

    def issue(self, common_name: str, alternatives: str = "") -> Certified:
        """Return a certificate with the subject alternative names `alternatives`, such as "DNS:a.example"."""
        self._issued += 1
        made = Certified(self._directory / f"{self._issued}.key", self._directory / f"{self._issued}.pem")
        request, extensions = made.chain.with_suffix(".csr"), made.chain.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "")
        self._run("req", *self._new_key(made.key), "-subj", f"/CN={common_name}", "-out", request)
        self._run(
            "x509", "-req", "-in", request, "-CA", self.chain, "-CAkey", self._key, "-CAcreateserial", "-days", "2",
            "-extfile", extensions, "-out", made.chain,
        )  # fmt: skip
        return made

    def credentials(self, caller: Certified | None) -> grpc.ChannelCredentials:
        """Return a channel's credentials that trust this authority, with the certificate of `caller` if there is
        one."""
        if caller is None:
            return grpc.ssl_channel_credentials(self.chain.read_bytes())
        return grpc.ssl_channel_credentials(self.chain.read_bytes(), caller.key.read_bytes(), caller.chain.read_bytes())

    def _new_key(self, path: Path) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path)]

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run([self._openssl, *map(str, arguments)], check=True, capture_output=True)
