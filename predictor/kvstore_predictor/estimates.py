"""Hazards of classes of chains, estimated from counts, and the ranks that follow from them.

A rank is the highest number of uses per second that a block is held. For a chain of age a and a horizon k, the chance
of its return by then is S(a) - S(k), and the time it would be held is the integral of S from a to k; the rank is the
best ratio over all horizons (Gittins, JRSS B 41, 1979; as "hits per space-time" in LHD: Beckmann, Chen, Cidon, NSDI
2018). So a chain just used, whose return is sure but half a minute away, outranks one that could return this second but
probably never does.

The module adds to the counts, too. Compiled code (`hazards.cpp`) does the work once it is there; NumPy does it until
then, and where there is no compiler. Both round alike at every step, so that what is evicted depends on neither, nor on
how a linear algebra library sums.
"""

from __future__ import annotations

import ctypes as ct
import logging
from pathlib import Path
from typing import Final

import numpy as np

from kvstore_cuda.host_copies import address_of
from kvstore_cuda.native_library import NativeLibrary, has_avx2, is_x86
from kvstore_predictor.ages import BINS, EDGES_S, WIDTHS_S, Floats, Ints
from kvstore_predictor.base import untouched

NATIVE_VARIABLE = "KVSTORED_NATIVE_HAZARDS"  # 0: NumPy alone
LEAST, MOST = 1e-7, 0.999
FLAT: Final[Floats] = np.clip(0.02 * WIDTHS_S / (5 + EDGES_S), 1e-5, 0.05)  # before anything is known
_SHRINK_FIRST, _SHRINK = 15.0, 30.0  # exposures, at the root and below
_RETURNS = 1.0
_IS_LATER = np.tril(np.ones((BINS, BINS)))[:, None, :]  # horizon at the end of bin k >= a, bin a
_SETTINGS: Floats = np.array([_SHRINK_FIRST, _SHRINK, _RETURNS, LEAST, MOST])
_SETTINGS_AT, _FLAT_AT, _WIDTHS_AT = address_of(_SETTINGS), address_of(FLAT), address_of(WIDTHS_S)
_NAME, _FOLDER, _SOURCE = "hazards", Path(__file__).parent, "hazards.cpp"


def ship() -> None:
    """Compile the library beside its source, for machines without a compiler. Raises BuildError."""
    from kvstore_cuda.native_build import AVX2, Unit, ship_library

    for flags in ((), AVX2) if is_x86() else ((),):
        ship_library(_NAME, _FOLDER, [Unit(_SOURCE, flags)])


def _made() -> ct.CDLL:
    from kvstore_cuda.native_build import AVX2, Unit, build_library  # by the few processes that need it

    unit = Unit(_SOURCE, AVX2 if has_avx2() else ())
    found = ct.PyDLL(str(build_library(_NAME, _FOLDER, [unit])))  # its calls take some µs: they keep the GIL
    place, size = ct.c_void_p, ct.c_int64
    found.kv_estimate.argtypes = (size, size, size, place, place, ct.c_double, *[place] * 5)
    found.kv_ranks.argtypes = (size, place, place, place)
    real = ct.c_double
    found.kv_make.argtypes = (size, place, size, size, place, place, real, *[place] * 6, size, *[place] * 3)
    found.kv_count.argtypes = (size, size, *[place] * 6)
    found.kv_estimate.restype = found.kv_ranks.restype = found.kv_make.restype = found.kv_count.restype = None
    found.kv_seen.argtypes, found.kv_seen.restype = (size, size, place, place, place, size, *[place] * 6), None
    found.kv_age.argtypes, found.kv_age.restype = (size, size, real, *[place] * 5, size, *[place] * 4), size
    found.kv_worths.argtypes = (
        size, size, size, real, *[place] * 9, size, *[place] * 5, real, real, *[place] * 7, size,
    )  # fmt: skip
    found.kv_least.argtypes = (size, size, size, *[place] * 6)
    found.kv_worths.restype = found.kv_least.restype = size
    return found


native = NativeLibrary(_NAME, NATIVE_VARIABLE, "hazards are estimated", _made, logging.INFO)


def estimated(counts: Floats, paths: Ints, gain: float, weights: Floats) -> tuple[Floats, Floats]:
    """Return the chance of a return in each age bin, by class and ladder, and by class alone: the ladders' estimates in
    the proportion of `weights`. `counts` has the exposed and the returned chains by node and age bin; `paths` names the
    nodes by class, ladder and step, from a coarse class to a fine one. One chain counts `gain`.
    """
    library = native.get()
    if library is None:
        return _estimated(counts, paths, gain, weights)
    classes, ladders, steps = paths.shape
    found, mixed = np.empty((classes, ladders, BINS)), np.empty((classes, BINS))
    library.kv_estimate(
        classes, ladders, steps, address_of(paths), address_of(counts), gain, _SETTINGS_AT, _FLAT_AT,
        address_of(weights), address_of(found), address_of(mixed),
    )  # fmt: skip
    return found, mixed


class ClassEstimates:
    """The estimates of all classes: by class and ladder in `by_ladder`, by class alone in `mixed`, and the `ranks` that
    follow. `paths` names the nodes of each class; after a void node there is no other. Compiled code remembers the
    estimates of nodes, which several classes share, as long as the counts keep their version.
    """

    def __init__(self, paths: Ints, by_ladder: Floats, mixed: Floats, ranks: Floats) -> None:
        self._paths, self._by_ladder, self._mixed, self._ranks = paths, by_ladder, mixed, ranks
        self._paths_at, *self._made_at = map(address_of, (paths, by_ladder, mixed, ranks))
        self._counts: Floats | None = None
        self._known, self._as_of = np.empty((0, 2, BINS)), np.empty((0, 2), np.int64)
        self._nodes_at = 0, 0, 0  # where the counts are, what is known of them, and as of which version

    def make(
        self, cells: Ints, counts: Floats, gain: float, version: int, weights: Floats, *, with_ranks: bool
    ) -> None:
        """Set the entries of the classes `cells` to what `estimated` and `ranks` return for them; the `version` of the
        `counts` has another number whenever they, or the `gain`, have changed.
        """
        library = native.get()
        if library is None:
            self._by_ladder[cells], self._mixed[cells] = _estimated(counts, self._paths[cells], gain, weights)
            if with_ranks:
                self._ranks[cells] = _ranks(self._mixed[cells])
            return
        if self._counts is not counts:
            self._counts, nodes = counts, len(counts)
            self._known, self._as_of = untouched(nodes, 2, BINS), untouched(nodes, 2).view(np.int64)
            self._nodes_at = address_of(counts), address_of(self._known), address_of(self._as_of)
        (counts_at, known_at, as_of_at), (by_ladder_at, mixed_at, ranks_at) = self._nodes_at, self._made_at
        library.kv_make(
            len(cells), address_of(cells), *self._paths.shape[1:], self._paths_at, counts_at, gain, _SETTINGS_AT,
            _FLAT_AT, _WIDTHS_AT, address_of(weights), known_at, as_of_at, version, by_ladder_at, mixed_at,
            ranks_at if with_ranks else 0,
        )  # fmt: skip


def count(counts: Floats, paths: Ints, cells: Ints, bins: Ints, exposed: Floats, returned: Floats) -> None:
    """Add what was seen of the classes `cells` in the age bins `bins` to `counts`, at each node that `paths` has of a
    class: `exposed` to the exposed chains, `returned` to the returned ones.
    """
    library = native.get()
    if library is not None:
        bins = np.ascontiguousarray(bins)  # a part of what `nonzero` found
        library.kv_count(
            len(cells), paths[0].size, address_of(paths), address_of(cells), address_of(bins), address_of(exposed),
            address_of(returned), address_of(counts),
        )  # fmt: skip
        return
    places = paths[cells].reshape(len(cells), -1) * (2 * BINS) + bins[:, None]
    flat, each, back = counts.reshape(-1), places.shape[1], returned != 0.0
    np.add.at(flat, places.reshape(-1), np.repeat(exposed, each))  # quick: one number for each place
    np.add.at(flat, places[back].reshape(-1) + BINS, np.repeat(returned[back], each))


def _estimated(counts: Floats, paths: Ints, gain: float, weights: Floats) -> tuple[Floats, Floats]:
    flat = counts.reshape(-1, BINS)
    nodes = 2 * paths.transpose(2, 0, 1)  # steps first: what follows goes through memory in one piece
    found = shrunk(flat.take(nodes, axis=0), flat.take(nodes + 1, axis=0), gain)
    np.minimum(np.maximum(found, LEAST), MOST, out=found)
    mixed: Floats = weights[0] * found[:, 0]
    for ladder in range(1, len(weights)):
        mixed += weights[ladder] * found[:, ladder]
    return found, mixed


def shrunk(exposed: Floats, events: Floats, gain: float) -> Floats:
    """Return the chance of a return in each age bin, from the counts of several classes of chains, from a coarse class
    to a fine one. `exposed` and `events` have a row for each class: the chains that could return, and the returns. One
    chain counts `gain`.

    The estimate of each class starts from the coarser class, and follows the class's own counts as they grow. Enough
    returns must be predicted too: one return in a narrow bin is chance, however many chains were exposed.
    """
    first = gain * _SHRINK_FIRST
    estimate: Floats = (events[0] + first * FLAT) / (exposed[0] + first)
    for own, returned in zip(exposed[1:], events[1:], strict=True):
        weight = np.maximum(gain * _RETURNS / estimate, gain * _SHRINK)
        estimate *= weight
        estimate += returned
        weight += own
        estimate /= weight
    return estimate


def ranks(hazards: Floats) -> Floats:
    """Return the rank of chains at the start of each age bin, in uses a second: the highest rate of uses that keeping
    the chain for some further time brings. Each row of `hazards` has for one class of chains the chance of a use in
    each age bin, given no use before.
    """
    library = native.get()
    if library is None:
        return _ranks(hazards)
    hazards = np.ascontiguousarray(hazards, np.float64)
    best = np.empty((len(hazards), BINS))
    library.kv_ranks(len(hazards), address_of(hazards), _WIDTHS_AT, address_of(best))
    return best


def _ranks(hazards: Floats) -> Floats:
    rows = len(hazards)
    survival = np.ones((rows, BINS + 1))
    np.cumprod(1.0 - hazards, axis=1, out=survival[:, 1:])
    held = np.zeros((rows, BINS + 1))
    np.cumsum(survival[:, :-1] * WIDTHS_S * (1.0 - 0.5 * hazards), axis=1, out=held[:, 1:])
    returns, seconds = np.empty((2, BINS, rows, BINS))  # horizons first: their maximum goes through whole rows
    np.subtract(survival[:, :-1], survival.T[1:, :, None], out=returns)
    np.subtract(held.T[1:, :, None], held[:, :-1], out=seconds)
    np.maximum(seconds, 1e-12, out=seconds)
    np.divide(returns, seconds, out=returns)
    returns *= _IS_LATER
    best: Floats = returns.max(axis=0)
    return best
