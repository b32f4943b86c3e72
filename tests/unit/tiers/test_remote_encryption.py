"""Sealed values: what opens, and that nothing that was changed, cut, exchanged or forged for a tenant does."""

from __future__ import annotations

import os
import random

import pytest

pytest.importorskip("cryptography", reason="needs the extra 'remote'")

from kvstore_tiers.objects import DamagedObject, object_name
from kvstore_tiers.remote.driver import NAME_CHARACTERS
from kvstore_tiers.remote.encryption import Sealer
from kvstore_tiers.remote.envelope import HEAD_BYTES, value_bytes

SECRET = bytes(range(32))
NAME = object_name(b"t" * 16, b"k" * 16)
IMAGE = random.Random(1).randbytes(9000)


def sealed(sealer: Sealer, name: bytes, image: bytes, *, plain: bool) -> bytearray:
    value = bytearray(value_bytes(len(image)))
    if plain:
        value[HEAD_BYTES : HEAD_BYTES + len(image)] = image
        inside = memoryview(value)[HEAD_BYTES : HEAD_BYTES + len(image)]
        sealer.seal(name, inside, memoryview(value), plain=True)
    else:
        sealer.seal(name, memoryview(image), memoryview(value), plain=False)
    return value


def opened(sealer: Sealer, name: bytes, value: bytes | bytearray, *, plain: bool, room: int = 20_000) -> bytes:
    return bytes(sealer.open(name, memoryview(bytearray(value)), memoryview(bytearray(room)), plain=plain))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4096, 9000])
def test_what_was_sealed_opens(plain: bool, nbytes: int) -> None:
    value = sealed(Sealer(SECRET), NAME, IMAGE[:nbytes], plain=plain)
    assert opened(Sealer(SECRET), NAME, value, plain=plain) == IMAGE[:nbytes], "another process of the same secret"
    assert (IMAGE[:nbytes] in value) == plain or nbytes == 1


def test_every_changed_byte_of_an_encrypted_value_shows() -> None:
    sealer = Sealer(SECRET)
    value = sealed(sealer, NAME, IMAGE[:200], plain=False)
    for at in range(len(value)):
        changed = bytearray(value)
        changed[at] ^= 1 << at % 8
        with pytest.raises(DamagedObject):
            opened(sealer, NAME, changed, plain=True)


@pytest.mark.parametrize("plain", [False, True])
def test_a_value_that_was_cut_or_grew_does_not_open(plain: bool) -> None:
    sealer = Sealer(SECRET)
    value = sealed(sealer, NAME, IMAGE, plain=plain)
    for other in (b"", value[:10], value[:HEAD_BYTES], value[:-1], value + b"\0"):
        with pytest.raises(DamagedObject):
            opened(sealer, NAME, bytes(other), plain=plain)


def test_a_value_opens_under_its_own_name_tenant_and_secret_alone() -> None:
    sealer = Sealer(SECRET)
    value = sealed(sealer, NAME, IMAGE, plain=False)
    for name in (object_name(b"u" * 16, b"k" * 16), object_name(b"t" * 16, b"l" * 16)):
        with pytest.raises(DamagedObject, match="another block's or tenant's"):
            opened(sealer, name, value, plain=False)
    with pytest.raises(DamagedObject):
        opened(Sealer(os.urandom(32)), NAME, value, plain=False)


def test_a_plain_value_is_refused_where_values_are_encrypted() -> None:
    sealer = Sealer(SECRET)
    value = sealed(sealer, NAME, IMAGE, plain=True)
    with pytest.raises(DamagedObject, match="not encrypted"):
        opened(sealer, NAME, value, plain=False)
    assert opened(sealer, NAME, sealed(sealer, NAME, IMAGE, plain=False), plain=True) == IMAGE


def test_versions_and_kinds_that_are_not_known_do_not_open() -> None:
    sealer = Sealer(SECRET)
    for at, byte in ((0, ord("X")), (4, 2), (5, 2)):
        value = sealed(sealer, NAME, IMAGE, plain=True)
        value[at] = byte
        with pytest.raises(DamagedObject, match="a version that this daemon knows"):
            opened(sealer, NAME, value, plain=True)


def test_an_image_larger_than_its_room_is_damage() -> None:
    sealer = Sealer(SECRET)
    value = sealed(sealer, NAME, IMAGE, plain=False)
    with pytest.raises(DamagedObject, match="more than"):
        opened(sealer, NAME, value, plain=False, room=len(IMAGE) - 1)


def test_two_values_of_one_image_differ_and_names_need_the_secret() -> None:
    sealer = Sealer(SECRET)
    assert sealed(sealer, NAME, IMAGE, plain=False) != sealed(sealer, NAME, IMAGE, plain=False)
    names = {one.value_name(NAME) for one in (sealer, Sealer(os.urandom(32)))}
    assert len(names) == 2 and all(len(name) == NAME_CHARACTERS for name in names)
    assert sealer.value_name(NAME) == Sealer(SECRET).value_name(NAME)


def test_the_form_of_a_value_is_pinned() -> None:
    """A value written by this version is read by the next: the names and the envelope of one secret do not change."""
    assert Sealer(SECRET).value_name(NAME) == GOLDEN_NAME
    value = sealed(Sealer(SECRET), NAME, b"image", plain=True)
    assert value.hex() == ("4b56523101000000" + "0500000000000000" + "00" * 32 + b"image".hex() + "00" * 16)
    assert opened(Sealer(SECRET), NAME, bytes.fromhex(GOLDEN_VALUE), plain=False) == b"golden image"


GOLDEN_NAME = "0e965b12ae95115b8bf9a003fd17c9a826ca53a80ac1e100"
GOLDEN_VALUE = (
    "4b565231010100000c0000000000000021ce53f1365523219bd2bb932783553184d4b53795307b8ddbfa442d00000000"
    "b24641e3657a28d7edd1da0f138501e41e790cc873cef070851f0be8"
)
