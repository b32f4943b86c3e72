"""A learned model in a file: NumPy's .npz, without pickle. What is in it is checked before it is used."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvstore_predictor.base import Array
from kvstore_predictor.learned import Learned
from kvstore_predictor.return_trees import ReturnTrees

BYTES_MAX = 16 << 20  # of all arrays, unpacked
ARRAYS_MAX = 64


def learned(path: Path | None) -> Learned:
    """The predictor with the model of this file. Raises ValueError with one line."""
    if path is None:
        raise ValueError("it needs a model: make one with kvstored predictor train")
    return Learned(read_model(path))


def read_model(path: Path) -> ReturnTrees:
    """Raises ValueError with one line that names the file."""
    try:
        with zipfile.ZipFile(path) as packed:
            sizes = [each.file_size for each in packed.infolist()]
        if len(sizes) > ARRAYS_MAX or sum(sizes) > BYTES_MAX:
            raise ValueError("it is too large")
        with np.load(path, allow_pickle=False) as found:
            return ReturnTrees({name: found[name] for name in found.files})
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: make it with kvstored predictor train") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged or no model of kvstored predictor train: {error}") from None
    except (ValueError, KeyError, EOFError, RuntimeError, zlib.error) as error:
        raise ValueError(f"{path} is no model that can be used: {error}") from None


def write_model(path: Path, arrays: Mapping[str, Array]) -> None:
    """As a whole or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as out:
            np.savez_compressed(out, allow_pickle=False, **arrays)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
