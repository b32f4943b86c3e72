"""Profiles of models say how few bits K and V of each layer may keep in a lossy form. `kvengine quality` makes them.

A profile is a JSON file with the digest of the weights that it is for; its name means nothing. In a daemon a layer
whose profile wants more bits than the tier's codec keeps gets them, and a layer that bears no loss stays exact. Without
a profile the codec's own bound of the error is the only one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore_proto.fingerprint import Fingerprint
from kvstore_tiers.codecs.shapes import ALL_BITS, K, PayloadShape, V, payload_shape

EXACT = "exact"
BITS: Final = {"int4": 4, "int8": 8, EXACT: ALL_BITS}  # by the name of the codec
PARTS: Final = {"k": K, "v": V}
_NAMES: Final = {kind: name for name, kind in PARTS.items()}


class ProfileError(ValueError):
    """Raised for a file that is no profile. The message names the file and what is wrong with it."""


class Profile(NamedTuple):
    """The profile of the weights with `weights_digest`: for each layer of the model the codecs (names in `BITS`) of its
    "k" and "v". Each alone costs at most `bound` nats a position, as far as it was measured."""

    model: str
    weights_digest: str
    bound: float
    layers: tuple[Mapping[str, str], ...]

    def bears(self, layers: Iterable[int], shape: PayloadShape) -> bytes:
        """Return `PayloadShape.bears` for payloads of `shape` with the layers `layers` of the model. A layer that the
        profile does not have loses nothing."""
        known = [self.layers[layer] if layer < len(self.layers) else {} for layer in layers]
        return bytes(BITS[layer.get(_NAMES.get(each.kind, ""), EXACT)] for layer in known for each in shape.tensors)

    def write(self, path: Path) -> None:
        """Write the file, in place of an older one. Raises OSError."""
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(json.dumps(self._asdict(), indent=1) + "\n")
        fresh.replace(path)


class Profiles:
    """The profiles that a daemon has, by the weights that they are for."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        self._by_weights = {_weights(each.weights_digest): each for each in profiles}

    def shape_of(self, known: Fingerprint | None, group_id: int, payload_bytes: int) -> PayloadShape | None:
        """Return the shape of payloads of a layer group, with what the model bears; None when it is not known. Any
        thread may call it."""
        shape = None if known is None else payload_shape(known, group_id, payload_bytes)
        if known is None or shape is None:
            return None
        profile, group = self._by_weights.get(_weights(known.weights_digest)), known.group(group_id)
        return shape if profile is None or group is None else shape._replace(bears=profile.bears(group.layers, shape))


def read_profiles(directory: Path | None) -> Profiles:
    """Return the profiles in the files *.json of `directory`; none without a directory. Raises ProfileError."""
    found: dict[str, Path] = {}
    profiles = []
    if directory is not None and not directory.is_dir():
        raise ProfileError(f"{directory} is no directory")
    for path in [] if directory is None else sorted(directory.glob("*.json")):
        profile = read_profile(path)
        former = found.setdefault(_weights(profile.weights_digest), path)
        if former is not path:
            raise ProfileError(f"{path} is for the weights of {former} too: remove one of them")
        profiles.append(profile)
    return Profiles(profiles)


def read_profile(path: Path) -> Profile:
    """Return the profile in the file `path`. Raises ProfileError."""
    try:
        raw: Any = json.loads(path.read_text())
        profile = Profile(str(raw["model"]), str(raw["weights_digest"]), float(raw["bound"]), tuple(raw["layers"]))
        wrong = next((each for each in profile.layers if {*each} != {*PARTS} or not {*each.values()} <= {*BITS}), None)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{path} is no profile of kvengine quality: {type(error).__name__}: {error}") from None
    if wrong is not None or not profile.layers or not profile.weights_digest:
        raise ProfileError(f"{path}: a layer is {{k, v}}, each one of {', '.join(BITS)}, got {wrong}")
    return profile


def _weights(digest: str) -> str:
    """Return the part of a digest that names the weights: an engine adds the order of its sums after a "+"."""
    return digest.partition("+")[0]
