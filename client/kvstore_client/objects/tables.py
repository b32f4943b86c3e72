"""Tables: arrays of rows that many processes look up in, mapped once.

A gather of many rows in random order is bound by page faults the first time, which `populate` takes away, and by memory
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.objects.mapped import MappedObject
from kvstore_client.objects.sources import ArraySource

if TYPE_CHECKING:
    from kvstore_cuda.device import CudaDevice

ROWS = "rows"  # the tensor


def array_source(rows: npt.NDArray[Any], dtype: str = "") -> ArraySource:
    """Return the source of a table with the array `rows`, of two dimensions or more, the first of which counts rows.
    `dtype` is for a type that NumPy lacks, such as "BF16", whose numbers are integers of its width here. Raises
    KVStoreError(INVALID) for another array.
    """
    if rows.ndim < 2:
        raise invalid(f"a table has rows: an array of two dimensions, got the shape {rows.shape}")
    return ArraySource({ROWS: rows}, {ROWS: (dtype, rows.shape)} if dtype else None, kind="table")


class Table:
    """The table in a mapped object: `rows` is a read-only array over it, shared by all processes that map it. With
    `populate` all pages are entered into this process's page table at once, which spares the first gathers their page
    faults."""

    def __init__(self, mapped: MappedObject, *, populate: bool = True) -> None:
        if ROWS not in mapped:
            raise invalid(f"{mapped.version.name} is no table: it has no tensor {ROWS!r}")
        self.mapped, self.rows = mapped, mapped[ROWS]
        if populate:
            mapped.populate()

    def __len__(self) -> int:
        return len(self.rows)

    @contextmanager
    def registered(self, device: CudaDevice) -> Iterator[int]:
        """Register the mapping with `device`, and yield the address by which its kernels reach the rows. Copies from
        the rows are direct meanwhile. No kernel or copy may be under way at the end. Raises DriverError, as on devices
        that cannot register read-only memory. The daemon's restart changes nothing: the device keeps the former pages.
        """
        address = self.mapped.address
        with device.current():
            device.register(address, len(self.mapped.content), read_only=True, for_kernels=True)
        try:
            with device.current():
                offset = self.mapped.entry(ROWS).offset
                yield device.device_pointer(address) + offset
        finally:
            device.forget(address, self.rows)

    def gather(self, indices: npt.ArrayLike, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return copies of the rows `indices`, in their order, in `out` if it is given. Raises IndexError for a row
        that is not there.
        """
        wanted = np.asarray(indices)
        if wanted.size and not (wanted.dtype.kind in "iu" and wanted.min() >= 0 and wanted.max() < len(self.rows)):
            raise IndexError(f"rows are whole numbers from 0 to {len(self.rows) - 1}")
        return np.take(self.rows, wanted, axis=0, out=out, mode="clip")  # checked: "raise" copies `out` once more
