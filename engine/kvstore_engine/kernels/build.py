"""Compiles the C++ kernels, once, into the user's cache directory.

The module chooses sources and flags. It does not decide whether to use the result (`selection` does). The library holds
the attention kernels once for each instruction set of the architecture and picks at run time (dispatch.cpp): a cache
directory shared by unlike machines can never serve instructions that a CPU lacks.
"""

import platform
from pathlib import Path

from kvstore_cuda.native_build import AVX2, AVX512, Unit, build_library

_PRODUCTS = ("q4_product.cpp", "q8_product.cpp")
_HEADERS = ("layout.h", "simd.h", "elements.h", "pass.h", "tile.h", "tile_sums.h", "product.h")


def build_kernels() -> Path:
    """Return the shared library's path; compile it (a few seconds) if the cache has none. Raises BuildError."""
    return build_library("kernels", Path(__file__).parent, _units(platform.machine()), _HEADERS)


def _units(machine: str) -> list[Unit]:
    """Return the compiler calls for the architecture `machine`."""
    builds: dict[str, tuple[str, ...]] = {"baseline": ()}
    if x86 := machine in ("x86_64", "AMD64"):
        builds |= {"avx2": AVX2, "avx512": AVX512}
    attention = [
        Unit(f"{source}.cpp", (f"-D{macro}=kv_{source}_{name}", *flags))
        for source, macro in (("paged_attention", "KV_ATTENTION"), ("page_choice", "KV_CHOICE"))
        for name, flags in builds.items()
    ]
    product_builds = {"avx2": AVX2, "vnni": (*AVX512, "-mavx512vnni")} if x86 else {}
    products = [
        Unit(source, (f"-DKV_PRODUCT=kv_{Path(source).stem}_{name}", *flags))
        for source in _PRODUCTS
        for name, flags in product_builds.items()
    ]
    dispatch = Unit("dispatch.cpp", ("-DKV_HAS_X86",) if x86 else ())
    return [*attention, *products, dispatch, Unit("block_copy.cpp", ())]
