"""Arrays of a lease live as long as they are used, and not a moment past the lease's end is a new one made."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import Session, arrays
from kvstore_client.anchors import give_back_dropped
from kvstore_client.arrays import LeaseArray
from kvstore_client.errors import KVStoreError
from kvstore_client.lease import Lease, joined
from kvstore_client.slot_arrays import by_arrays
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import HEADS_ORDER, PAIRS_ORDER, TOKENS_ORDER
from tests.reference.fake_daemon import FakeDaemon, eventually
from tests.reference.leased_memory import MemoryGrant, lease_over
from tests.reference.twelve_blocks import PAYLOADS, TOKENS

GROUP = LayerGroup(0, "full", 0, (4, 5), 2 * 2 * 4 * 2, heads=2)
MODEL = Fingerprint("m", "w", kv_dtype="f16", block_tokens=64, groups=(GROUP,))
PAYLOAD = np.random.default_rng(0).integers(0, 256, MODEL.payload_bytes(), dtype=np.uint8)
BFLOATS = replace(MODEL, kv_dtype="bf16")


def leased(fingerprint: Fingerprint = MODEL) -> tuple[Lease, MemoryGrant]:
    return lease_over(fingerprint, [PAYLOAD, PAYLOAD[::-1].copy()])


def releases(grant: MemoryGrant) -> int:
    """Return how often the lease was given back; what was dropped is given back with the next request. Nothing here
    waits for the garbage collector: no array is in a circle.
    """
    give_back_dropped()
    return grant.released


def capsule(array: LeaseArray) -> Any:
    return array.__dlpack__()


def of_torch(array: LeaseArray) -> Any:
    return pytest.importorskip("torch", reason="the extra `torch` is not installed").from_dlpack(array)


def of_jax(array: LeaseArray) -> Any:
    return pytest.importorskip("jax", reason="jax is not installed").dlpack.from_dlpack(array)


NEWER_NUMPY = pytest.mark.skipif(not arrays._HAS_VERSIONS, reason="NumPy before 2.1 makes no versioned capsules")
DOORS = pytest.mark.parametrize(
    "take", [np.asarray, np.from_dlpack, capsule, of_torch, of_jax], ids=["asarray", "numpy", "capsule", "torch", "jax"]
)


@DOORS
def test_a_released_lease_is_given_back_when_its_last_array_goes(take: Any) -> None:
    lease, grant = leased()
    with lease:
        first, second = take(lease.array(0, 1, kind="k")), take(lease.array(1, 0, kind="v"))
    assert releases(grant) == 0 and not lease.valid
    del first
    assert releases(grant) == 0
    del second
    assert releases(grant) == 1
    lease.release()
    del lease
    assert releases(grant) == 1, "once"


@DOORS
def test_after_its_end_a_lease_has_no_arrays(take: Any) -> None:
    for end in (Lease.release, lambda lease: setattr(lease.grant, "alive", False), expire):
        lease, _ = leased()
        array = lease.array(0, kind="k")
        end(lease)
        with pytest.raises(BufferError, match="lease 7 of 2 blocks has ended: its bytes may be another block's"):
            take(array)


def expire(lease: Lease) -> None:
    lease.grant.now += 60.0  # type: ignore[union-attr]


def test_arrays_that_nobody_takes_defer_nothing() -> None:
    lease, grant = leased()
    array = lease.array(0, kind="k")
    lease.release()
    assert grant.released == 1, "at once"
    assert "released" in repr(array)


def test_an_array_outlives_the_name_of_its_lease() -> None:
    lease, grant = leased()
    taken = np.asarray(lease.array(0, kind="bytes"))
    del lease
    assert releases(grant) == 0 and np.array_equal(taken, PAYLOAD)


def test_a_lease_of_several_is_released_with_its_arrays() -> None:
    (first, one), (second, two) = leased(), leased()
    whole = joined([first, second], one.clock)
    taken = np.asarray(whole.array(3, kind="bytes"))
    whole.release()
    assert (releases(one), releases(two)) == (0, 0) and np.array_equal(taken, PAYLOAD[::-1])
    del taken
    assert (releases(one), releases(two)) == (1, 1)


def test_the_daemon_keeps_what_an_array_shows(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    with session.get(TOKENS) as lease:
        taken = np.from_dlpack(lease.array(3, kind="bytes"))
    session.ping()
    session.touch(TOKENS)
    assert not daemon.released and np.array_equal(taken, PAYLOADS[3].view(np.uint8).reshape(-1))
    del taken, lease
    session.ping()
    eventually(lambda: len(daemon.released) == 1)


class Takers:
    """Threads that take arrays of a lease until it has ended."""

    def __init__(self, lease: Lease, grant: MemoryGrant) -> None:
        self.lease, self.grant = lease, grant
        self.begin, self.wrong = threading.Barrier(5), 0
        self.threads = [threading.Thread(target=self.take) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def take(self) -> None:
        self.begin.wait()
        for _ in range(20):
            try:
                array = np.asarray(self.lease.array(0, kind="bytes"))
            except (BufferError, KVStoreError):
                return
            self.wrong += self.grant.released or not np.array_equal(array, PAYLOAD)
            del array


def test_threads_that_take_while_another_releases_see_the_bytes_or_an_error() -> None:
    for _ in range(100):
        lease, grant = leased()
        takers = Takers(lease, grant)
        takers.begin.wait()
        lease.release()
        for thread in takers.threads:
            thread.join()
        assert not takers.wrong and releases(grant) == 1


def test_a_forked_child_makes_no_arrays_and_gives_nothing_back() -> None:
    lease, grant = leased()
    array = lease.array(0, kind="k")
    taken = np.asarray(array)
    child = os.fork()
    if not child:
        try:
            np.asarray(array)
        except BufferError as error:
            del taken, array, lease
            give_back_dropped()
            os._exit(0 if "is the parent process's" in str(error) and not grant.released else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    del taken
    assert lease.valid and releases(grant) == 0


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_process_may_end_with_arrays_in_its_hands(library: str) -> None:
    pytest.importorskip(library, reason=f"the extra `{library}` is not installed")
    program = (
        f"import sys, numpy, {library}\n"
        "from tests.unit.client.test_client_arrays import leased\n"
        "array = leased()[0].array(0, kind='k')\n"
        f"sys.modules['kept'] = [array.__dlpack__(), numpy.asarray(array), {library}.from_dlpack(array)]\n"
    )
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, cwd=_ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")


_ROOT = Path(__file__).parents[3]


@dataclass
class Header:
    """Fields of a DLPack capsule, read as a library in C would."""

    is_versioned: bool
    flags: int
    device: tuple[int, int]
    code: int
    bits: int


def header(made: Any) -> Header:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    is_versioned = "dltensor_versioned" in repr(made)
    at = get(made, b"dltensor_versioned" if is_versioned else b"dltensor")
    flags = ctypes.c_uint64.from_address(at + 24).value if is_versioned else 0
    tensor = at + (32 if is_versioned else 0)
    device = (ctypes.c_int32 * 2).from_address(tensor + 8)
    kind = (ctypes.c_uint8 * 2).from_address(tensor + 20)
    return Header(is_versioned, flags, (device[0], device[1]), kind[0], kind[1])


@NEWER_NUMPY
def test_who_knows_versions_is_told_that_it_is_read_only() -> None:
    lease, _ = leased(BFLOATS)
    array = lease.array(0, kind="k")
    assert header(array.__dlpack__(max_version=(1, 3))) == Header(True, 1, (1, 0), 4, 16)
    assert header(array.__dlpack__(max_version=(1, 0), copy=True)).flags == 2, "a copy is the caller's"
    for older in (None, (0, 8)):
        assert header(array.__dlpack__(max_version=older)) == Header(False, 0, (1, 0), 4, 16)
    with pytest.raises(BufferError, match="not copied by itself"):
        array.__dlpack__(dl_device=(2, 0))


def test_an_older_numpy_makes_capsules_that_everyone_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_HAS_VERSIONS", False)
    lease, grant = leased(BFLOATS)
    assert header(lease.array(0, kind="k").__dlpack__(max_version=(1, 3))) == Header(False, 0, (1, 0), 4, 16)
    copied = lease.array(0, kind="k").__dlpack__(copy=True)
    lease.release()
    assert releases(grant) == 1 and header(copied).code == 4


@NEWER_NUMPY
def test_a_copy_is_not_of_the_lease() -> None:
    lease, grant = leased()
    copies = [
        np.array(lease.array(0, kind="bytes")),
        np.from_dlpack(lease.array(0, kind="bytes"), copy=True),
        np.asarray(lease.array(0, kind="k"), dtype=np.float64),
    ]
    lease.release()
    assert releases(grant) == 1 and all(each.flags.writeable for each in copies)
    assert np.array_equal(copies[0], PAYLOAD) and copies[2].dtype == np.float64


def test_numpy_has_bfloat16_as_integers_or_as_that_of_ml_dtypes() -> None:
    lease, _ = leased(BFLOATS)
    shown = np.asarray(lease.array(0, kind="k"))
    try:
        import ml_dtypes
    except ImportError:
        assert shown.dtype == np.uint16
    else:
        assert shown.dtype == ml_dtypes.bfloat16
    assert not hasattr(lease.array(0, kind="k"), "__cuda_array_interface__"), "it is in host memory"


class Chunk:
    """Device memory that nothing here may touch: it has an address and no bytes."""

    address, nbytes, device = 0x7F00_0000_0000, 1 << 20, 3

    def read(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        raise AssertionError("an array of a device was copied")


def on_device(fingerprint: Fingerprint = MODEL) -> tuple[Lease, MemoryGrant]:
    lease, grant = leased(fingerprint)
    held = [block._replace(chunk=Chunk(), offset=8192) for block in lease.held_blocks]
    return Lease(held, grant, expires_in_s=10.0, clock=grant.clock), grant


def test_an_array_on_a_device_is_described_and_not_touched() -> None:
    lease, grant = on_device(BFLOATS)
    array = lease.array(1, 1, kind="v")
    assert array.__dlpack_device__() == (2, 3)
    assert array.address == lease.device_address(1) + len(PAYLOAD) * 3 // 4
    for version in (None, (1, 0)):
        made = header(array.__dlpack__(stream=1, max_version=version))
        assert (made.device, made.code, made.bits) == ((2, 3), 4, 16)
    del made
    with pytest.raises(BufferError, match="not copied by itself"):
        array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(TypeError, match=r"CUDA device 3, read-only.* is not in host memory: lease.payload"):
        np.asarray(array)
    described = array.__cuda_array_interface__
    assert described == {
        "version": 3, "typestr": "<u2", "shape": (64, 2, 4), "strides": (16, 8, 2), "data": (array.address, False),
        "stream": None,
    }  # fmt: skip
    lease.release()
    assert releases(grant) == 0, "whoever read the description holds on to the array"
    del array
    assert releases(grant) == 1


def test_after_its_end_a_lease_describes_nothing() -> None:
    lease, _ = on_device()
    array = lease.array(0, kind="k")
    lease.release()
    for describe in (lambda: array.__cuda_array_interface__, array.__dlpack__):
        with pytest.raises(BufferError, match="lease 7 of 2 blocks has ended"):
            describe()


def test_cupy_takes_the_memory_of_an_array(tmp_path: Path) -> None:
    """CuPy takes it as far as it goes without a driver: an array over memory of another's."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install '.[cuda]'")
    lease, grant = on_device()
    array = lease.array(0, kind="k")
    described = array.__cuda_array_interface__
    memory = cupy.cuda.UnownedMemory(described["data"][0], len(PAYLOAD), array, 0)
    taken = cupy.ndarray(
        described["shape"], described["typestr"], cupy.cuda.MemoryPointer(memory, 0), described["strides"]
    )
    assert (taken.data.ptr, taken.dtype, taken.strides) == (array.address, np.float16, array.strides)
    del array, memory
    lease.release()
    assert releases(grant) == 0
    del taken
    assert releases(grant) == 1


@pytest.mark.parametrize(
    ("fingerprint", "layer", "kind", "said"),
    [
        (MODEL, 2, "k", "layer 2 of 2 cannot be cut"),
        (MODEL, -1, "k", "layer must be a whole number"),
        (MODEL, 0, "K", "kind 'K' is unknown; known: k, v, bytes"),
        (replace(MODEL, layout="opaque"), 0, "k", "its layout 'opaque' is none of layer-major/k-then-v/token-major, "),
        (replace(MODEL, layout='{"engine":"vllm"}'), 0, "v", "its layout names no order of bytes"),
        (replace(MODEL, kv_dtype="q8_0"), 0, "v", "its type 'q8_0' is not one of plain numbers"),
        (replace(MODEL, kv_dtype="int8"), 0, "k", "its type 'int8' is not one of plain numbers"),
        (replace(MODEL, groups=(replace(GROUP, kind="latent"),)), 0, "k", "a group of kind latent has no K and V"),
        (replace(MODEL, groups=(replace(GROUP, layers=()),)), 0, "k", "its fingerprint lists no layers"),
        (replace(MODEL, groups=(replace(GROUP, heads=3),)), 0, "k", "are no K and V of 64 tokens"),
        *(
            (replace(MODEL, layout=order, groups=(replace(GROUP, heads=0),)), 0, "k", "does not say how many heads")
            for order in (HEADS_ORDER, PAIRS_ORDER)
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(fingerprint: Fingerprint, layer: int, kind: Any, said: str) -> None:
    lease, _ = leased(fingerprint)
    with pytest.raises(KVStoreError, match=said) as refused:
        lease.array(0, layer, kind=kind)
    assert "\n" not in str(refused.value)
    assert np.array_equal(np.asarray(lease.array(0, kind="bytes")), PAYLOAD), "the bytes can always be had"


@pytest.mark.parametrize("order", [MODEL.layout, TOKENS_ORDER])
def test_without_heads_a_token_has_one_row(order: str) -> None:
    lease, _ = leased(replace(MODEL, layout=order, groups=(replace(GROUP, heads=0),)))
    with_heads, _ = leased(replace(MODEL, layout=order))
    for kind in ("k", "v"):
        row = np.asarray(lease.array(0, 1, kind=kind))  # type: ignore[arg-type]
        assert row.shape == (64, 8)
        assert row.tobytes() == np.asarray(with_heads.array(0, 1, kind=kind)).tobytes()  # type: ignore[arg-type]


def test_a_slot_is_over_when_its_function_has_ended() -> None:
    destination, kept = np.zeros_like(PAYLOAD), []

    def write(slot: Any) -> None:
        kept.append(slot.array(1, kind="v"))
        assert not kept[0].readonly and kept[0].lease is slot
        np.asarray(kept[0])[...] = 1.0

    assert by_arrays(MODEL, write)(destination) is None
    half = len(PAYLOAD) // 4
    assert np.array_equal(destination[3 * half :].view(np.float16), np.ones(half // 2, np.float16))
    assert not destination[: 3 * half].any()
    with pytest.raises(BufferError, match="its put went on"):
        np.asarray(kept[0])


def test_a_slot_that_is_written_later_is_over_when_that_has_ended() -> None:
    kept: list[Any] = []

    def write(slot: Any) -> Any:
        kept.append(slot.array(kind="bytes"))
        return lambda: np.copyto(np.asarray(kept[0]), PAYLOAD)

    destination = np.zeros_like(PAYLOAD)
    finish = by_arrays(MODEL, write)(destination)
    assert finish is not None
    np.asarray(kept[0])
    finish()
    assert np.array_equal(destination, PAYLOAD)
    with pytest.raises(BufferError, match="its put went on"):
        np.asarray(kept[0])


def test_what_fails_to_write_a_slot_ends_it() -> None:
    kept: list[Any] = []

    def write(slot: Any) -> None:
        kept.append(slot)
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        by_arrays(MODEL, write)(np.zeros_like(PAYLOAD))
    with pytest.raises(BufferError):
        kept[0].hold()
    with pytest.raises(KVStoreError, match="no layer group 9"):
        by_arrays(MODEL, write, group=9)
