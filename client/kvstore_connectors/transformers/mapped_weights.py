"""The files that a model's weights are mapped from: safetensors of the model's own dtype are not copied by loading.

A mapped weight changes with its file, unseen by torch. Owns the open files of each model, and what they looked like
when its weights were hashed, or named by an id. Weights that were copied, or are on a device, have no files here.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvstore_client.errors import invalid
from kvstore_connectors.weight_files import DELETED, Mapping, WeightFiles, mappings_now


@dataclass(slots=True)
class _Watched:
    files: WeightFiles
    by_content: bool  # any sign of a change has the weights hashed again


_watched: WeakKeyDictionary[PreTrainedModel, _Watched] = WeakKeyDictionary()


def watch(model: PreTrainedModel, *, by_content: bool) -> None:
    """Look at the files of a model now: what comes later is a change. Raises KVStoreError(INVALID) where one is gone
    and cannot be watched."""
    tensors = [*model.parameters(), *model.buffers()]
    _watched[model] = _Watched(WeightFiles(map(_path_of, _mappings_of(tensors))), by_content)


def is_watched(model: PreTrainedModel) -> bool:
    return model in _watched


def written_file(model: PreTrainedModel) -> str:
    """Return a file of a model's weights that was written to since `watch`; empty if none was."""
    known = _watched.get(model)
    if known is None:
        return ""
    return known.files.changed(by_content=known.by_content)


def _mappings_of(tensors: Iterable[torch.Tensor]) -> list[Mapping]:
    """Return a mapping of each file that some of `tensors` are in."""
    mappings = sorted(mappings_now(), key=lambda each: each.begin)
    begins = [each.begin for each in mappings]
    found: dict[tuple[int, int, str], Mapping] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            first = tensor.data_ptr()
            mapping = mappings[max(bisect.bisect_right(begins, first) - 1, 0)]
            if mapping.begin <= first < mapping.end:
                found[mapping.device, mapping.inode, mapping.path] = mapping
    return [each for each in found.values() if not each.path.startswith(("/memfd:", "/dev/"))]


def _path_of(mapping: Mapping) -> Path:
    """Return a path by which a mapped file can be opened still."""
    if not mapping.path.endswith(DELETED):
        return Path(mapping.path)
    link = Path(f"/proc/self/map_files/{mapping.begin:x}-{mapping.end:x}")  # for the superuser alone
    if not os.access(link, os.R_OK):
        gone = mapping.path.removesuffix(DELETED)
        raise invalid(f"weights are mapped from {gone}, which was replaced or removed: load the model again")
    return link
