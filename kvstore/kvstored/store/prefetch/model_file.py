"""A learned model in a file: NumPy's .npz, without pickle. The content is checked before it is used."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvstore_predictor.base import Array
from kvstore_predictor.learned import LearnedPredictor
from kvstore_predictor.return_trees import ReturnTrees
from kvstore_proto.replaced_file import replaced_file, usual_mode

BYTES_MAX = 16 << 20  # of all arrays, unpacked
ARRAYS_MAX = 64
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def learned(path: Path | None) -> LearnedPredictor:
    """Return a predictor with the model in the file `path`. Raises ValueError, with one line, if there is none or it
    cannot be used.
    """
    if path is None:
        raise ValueError("it needs a model: make one with kvstored predictor train")
    return LearnedPredictor(read_model(path))


def read_model(path: Path) -> ReturnTrees:
    """Return the model in the file `path`. Raises ValueError with one line that names the file."""
    try:
        with zipfile.ZipFile(path) as packed:
            members = packed.infolist()
            if len(members) > ARRAYS_MAX or sum(each.file_size for each in members) > BYTES_MAX:
                raise ValueError("it is too large")
            return ReturnTrees({each.filename.removesuffix(".npy"): _array(packed, each) for each in members})
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: make it with kvstored predictor train") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged or no model of kvstored predictor train: {error}") from None
    except Exception as error:  # NumPy and zipfile raise many kinds for bytes that make no sense
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path} is no model that can be used: {reason}") from None


def _array(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Return an array, after comparing the size that its header announces with the member's size, before memory is
    taken for it.
    """
    with packed.open(member) as content:
        version = np.lib.format.read_magic(content)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename!r} is an array of version {version}")
        shape, _, kind = _HEADERS[version](content)
        if kind.hasobject:
            raise ValueError(f"{member.filename!r} holds Python objects")
        if not kind.itemsize or math.prod(shape) * kind.itemsize != member.file_size - content.tell():
            raise ValueError(f"{member.filename!r} is {member.file_size} bytes and announces shape {shape} of {kind}")
    with packed.open(member) as content:
        found: Array = np.lib.format.read_array(content, allow_pickle=False)
        return found


def write_model(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write `arrays` as a model to `path`, which is replaced as a whole or not at all. Raises OSError."""
    with replaced_file(path, mode=usual_mode(), is_shared=True) as out:
        np.savez_compressed(out, allow_pickle=False, **arrays)
