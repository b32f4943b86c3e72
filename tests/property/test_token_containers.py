"""Every container of token ids takes the one checked way: the bytes of its own numbers, or INVALID."""

from __future__ import annotations

import array
import ctypes
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import pack_tokens
from kvstore_proto.token_ids import checked_tokens
from tests.reference.benchmark_scripts import importable
from tests.reference.examples import fewer

PACKED = np.array([3, -7, 2**31 - 1], "<i4").tobytes()
IDS = [3, -7, 2**31 - 1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


class Foreign:
    """An array of another library: it has no buffer, and makes a NumPy array when asked."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Any) -> Any:
        return self.values[at]


def _shared_keys(count: int) -> tuple[int, int, int]:
    import token_containers

    counted: tuple[int, int, int] = token_containers.shared_keys(count)
    return counted


def test_no_two_prompts_have_one_key(scripts: None) -> None:
    assert _shared_keys(10_000) == (0, 0, 0)


@pytest.mark.slow
def test_no_two_of_many_prompts_have_one_key(scripts: None) -> None:
    assert _shared_keys(fewer(1_000_000, 0.2)) == (0, 0, 0)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        deque(IDS),
        [np.int64(each) for each in IDS],
        [np.array(each) for each in IDS],
        np.array(IDS),
        np.array(IDS, ">i8"),
        np.array(IDS, object),
        np.array([IDS]),
        np.ma.array(IDS, mask=False),
        np.repeat(np.array(IDS, np.int32), 2)[::2],
        array.array("q", IDS),
        memoryview(array.array("i", IDS)),
        (ctypes.c_int64 * 3)(*IDS),
        Foreign(IDS),
        Foreign(np.array(IDS, ">i4")),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_integers_of_any_width_are_themselves(tokens: Any) -> None:
    assert pack_tokens(tokens) == PACKED


@pytest.mark.parametrize(
    "tokens",
    [
        [2**31],
        [-(2**31) - 1],
        [10**40],
        array.array("q", [2**32 + 5]),
        array.array("I", [2**32 - 1]),
        memoryview(array.array("Q", [2**64 - 1])),
        np.array([2**31], np.uint32),
        Foreign([2**32 + 5]),
        [5.0],
        [np.float32(5)],
        array.array("d", [5.0]),
        Foreign([5.9]),
        [Decimal(5)],
        [Fraction(5)],
        [float("nan")],
        [5j],
        [True, 7],
        [np.True_],
        np.ones(3, bool),
        Foreign([True]),
        ["5"],
        [np.str_("5")],
        np.array(["5"]),
        "5",
        b"5555",
        bytearray(4),
        [None],
        [[5]],
        [[5, 6], [7]],
        np.zeros((2, 2), np.int32),
        np.int32(5),
        np.array(5),
        5,
        np.ma.array([5, 6], mask=[False, True]),
        np.array([5], "m8[s]"),
        {5, 6},
        {5: 6},
        iter([5]),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}",
)
def test_what_is_no_int32_is_refused(tokens: Any) -> None:
    with pytest.raises(KVStoreError, match=r"^tokens must be a flat run of int32 token ids: .") as refused:
        pack_tokens(tokens)
    assert refused.value.kind is ErrorKind.INVALID and "\n" not in refused.value.message


def test_a_library_that_refuses_in_its_own_way_is_named() -> None:
    class Broken:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("on another device")

    with pytest.raises(KVStoreError, match="Broken: on another device"):
        pack_tokens(Broken())  # type: ignore[arg-type]

    class Talkative:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("on\nanother device " + "x" * 10_000)

    with pytest.raises(KVStoreError, match="Talkative: on another device") as refused:
        pack_tokens(Talkative())  # type: ignore[arg-type]
    assert "\n" not in refused.value.message and len(refused.value.message) < 400


def test_a_list_that_another_thread_cuts_short_is_refused() -> None:
    class Shrinking(list[int]):
        def __getitem__(self, at: Any) -> Any:
            raise IndexError("list index out of range")

    with pytest.raises(KVStoreError, match="out of range"):
        pack_tokens(Shrinking([0, 1]))


def test_ids_about_the_ends_of_an_int32_in_wider_arrays() -> None:
    ends = [-(2**31), -1, 0, 2**31 - 1]
    for kind in ("<i8", ">i8", "O"):
        assert pack_tokens(np.array(ends, kind)) == np.array(ends, "<i4").tobytes()
        for wide in (2**31, -(2**31) - 1, 2**63 - 1, -(2**63)):
            with pytest.raises(KVStoreError, match="32 bits"):
                pack_tokens(np.array([*ends, wide], kind))
    for kind in ("<u4", ">u4", "<u8", ">u8"):
        assert pack_tokens(np.array(ends[2:], kind)) == np.array(ends[2:], "<i4").tobytes()
        with pytest.raises(KVStoreError, match="32 bits"):
            pack_tokens(np.array([0, 2**31], kind))


def test_tensors_are_as_arrays() -> None:
    torch = pytest.importorskip("torch")
    for kind in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        assert pack_tokens(torch.tensor([1, 2, 100], dtype=kind)) == pack_tokens([1, 2, 100])
    assert pack_tokens([torch.tensor(5)]) == pack_tokens(torch.arange(10)[5::9]) == pack_tokens([5])
    kinds = (torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    bad = [torch.ones(2, dtype=kind) for kind in kinds]
    bad += [torch.tensor([2**40]), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int64, device="meta")]
    for tokens in (*bad, [torch.tensor(True)], torch.zeros((2, 2), dtype=torch.int64)):
        with pytest.raises(KVStoreError, match="int32 token ids"):
            pack_tokens(tokens)


def test_an_array_of_int32_is_not_copied() -> None:
    ids = np.arange(5, dtype=np.int32)
    assert checked_tokens(ids) is ids and len(checked_tokens([])) == 0
