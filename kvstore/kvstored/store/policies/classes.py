"""How many blocks, and bytes, of a tier are hot, warm and cold: counted with masks over all row numbers."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kvstored.store.policies.base import ResidencyClass

Mask = npt.NDArray[np.bool_]
Masks = tuple[Mask, Mask]  # is it hot; is it hot or warm: of rows outside the tier, anything


def count_classes(here: Mask, masks: Masks) -> dict[ResidencyClass, int]:
    """Rows by class. `here`: which rows are in the tier."""
    hot, warm = masks
    n_hot = int(np.count_nonzero(here & hot))
    n_warm = int(np.count_nonzero(here & warm)) - n_hot
    return {
        ResidencyClass.HOT: n_hot,
        ResidencyClass.WARM: n_warm,
        ResidencyClass.COLD: int(np.count_nonzero(here)) - n_hot - n_warm,
    }


def sum_classes(here: Mask, masks: Masks, nbytes: array[int]) -> dict[ResidencyClass, int]:
    """Bytes of slots by class. `nbytes`: by row, u32; rows beyond it have no copy."""
    sizes = np.frombuffer(nbytes, np.uint32)
    known = min(len(here), len(sizes))
    sizes, here = sizes[:known], here[:known]
    hot, warm = (mask[:known] for mask in masks)
    all_bytes, hot_bytes, warm_bytes = (int(sizes[rows].sum()) for rows in (here, here & hot, here & (hot | warm)))
    return {
        ResidencyClass.HOT: hot_bytes,
        ResidencyClass.WARM: warm_bytes - hot_bytes,
        ResidencyClass.COLD: all_bytes - warm_bytes,
    }
