"""Profiles of models: whom they are for, what they say of a layer group, and one line for a file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_tiers.codecs.profiles import Profile, ProfileError, read_profiles

LAYERS = ({"k": "int4", "v": "exact"}, {"k": "int8", "v": "int4"}, {"k": "exact", "v": "int8"})
GROUPS = (
    LayerGroup(0, layers=(0, 2, 3), bytes_per_token_per_layer=256, heads=2),
    LayerGroup(1, "sliding", 64, layers=(1,), bytes_per_token_per_layer=256, heads=2),
)


def test_the_layers_of_each_group_bear_what_the_profile_of_the_weights_says(tmp_path: Path) -> None:
    Profile("m", "abc", 1e-5, LAYERS).write(tmp_path / "one.json")
    Profile("n", "def", 1e-5, LAYERS[:1]).write(tmp_path / "two.json")
    profiles, known = read_profiles(tmp_path), Fingerprint("any", "abc+order of sums", groups=GROUPS)
    for group, bears in ((0, [4, 0, 0, 8, 0, 0]), (1, [8, 4])):  # layer 3 is unknown: it loses nothing
        shape = profiles.shape_of(known, group, known.payload_bytes(group))
        assert shape is not None and list(shape.bears) == bears
    other = profiles.shape_of(Fingerprint("any", "ab", groups=GROUPS), 0, known.payload_bytes(0))
    assert other is not None and other.bears == b""
    assert profiles.shape_of(None, 0, 1) is None and profiles.shape_of(known, 7, 1) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": [{"k": "int4"}]}, "a layer is {k, v}, each one of int4, int8, exact, got {'k': 'int4'}"),
        ({"layers": [{"k": "int4", "v": "int3"}]}, "a layer is {k, v}"),
        ({"layers": []}, "a layer is {k, v}"),
        ({"layers": 7}, "is no profile of kvengine quality: TypeError"),
        ({"bound": "much"}, "is no profile of kvengine quality: ValueError"),
        ({"weights_digest": "abc+more"}, "is for the weights of"),
    ],
)
def test_a_file_that_is_no_profile_is_one_line(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    Profile("m", "abc", 1e-5, LAYERS).write(tmp_path / "a.json")
    raw = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "b.json").write_text(json.dumps(raw | {"weights_digest": "own"} | change))
    with pytest.raises(ProfileError) as caught:
        read_profiles(tmp_path)
    assert why in str(caught.value) and "\n" not in str(caught.value) and "b.json" in str(caught.value)
    with pytest.raises(ProfileError, match="is no directory"):
        read_profiles(tmp_path / "missing")
    assert read_profiles(None).shape_of(None, 0, 1) is None
