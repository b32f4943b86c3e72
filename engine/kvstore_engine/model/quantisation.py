"""The tensor types that the loaded ggml library can multiply with, found by asking it.

The module owns the question and the refusal. There is no list of supported types here: builds of ggml differ, and a
type that a later one learns to multiply works without a change, once the reader knows its block size.
"""

from functools import cache

from kvstore_engine.ggml import Library
from kvstore_engine.ggml.structs import CpuTypeTraits
from kvstore_engine.gguf import TENSOR_TYPES, GGUFFile
from kvstore_engine.model.metadata import UnsupportedModel


@cache
def multipliable_types(library: Library) -> frozenset[int]:
    """Return the numbers of the tensor types whose matrices ggml's processor code in `library` can multiply."""
    return frozenset(number for number in TENSOR_TYPES if _knows(library, number) and _multiplies(library, number))


def check_quantisation(file: GGUFFile, library: Library) -> None:
    """Raise UnsupportedModel if `file` has a matrix of a type that ggml's `library` cannot multiply. The message names
    the first such matrix.
    """
    supported = multipliable_types(library)
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and tensor.ggml_type not in supported:
            names = ", ".join(TENSOR_TYPES[number].name for number in sorted(supported))
            raise UnsupportedModel(
                f"quantisation {tensor.type_name} ({tensor.name}) is not supported by ggml "
                f"{library.version().decode()}; supported: {names}"
            )


def _knows(library: Library, number: int) -> bool:
    """Return whether the library's type of this number is the expected one: an older library has fewer types."""
    kind = TENSOR_TYPES[number]
    # Sizes first: past the end of an older library's table even the name may be no pointer.
    if (library.blck_size(number), library.type_size(number)) != (kind.block_elements, kind.block_bytes):
        return False
    name: bytes = library.type_name(number)
    return name.decode().lower() == kind.name


def _multiplies(library: Library, number: int) -> bool:
    return CpuTypeTraits.from_address(library.get_type_traits_cpu(number)).vec_dot is not None
