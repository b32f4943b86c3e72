"""The list of the databases of the state environment: content, form, time of saving, and the cost of a loss.

There is no other such list. Each value ends with its own checksum, which covers the value, its key and the name of its
database: a value in the wrong place is found to be wrong, too. A database with `checks_itself` has a checksum for each
row instead. The worker imports this module, so the module imports little.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMAT = 1  # of the environment; one of another is set aside
FORMAT_KEY, WRITER_KEY, KEY_KEY = b"format", b"writer", b"key"
SLOT = struct.Struct(">IQIQ")  # the place of a slot as a key: container, offset, bytes, generation


class Database(NamedTuple):
    """The description of one database of the daemon's saved state. `lost` says what is lost when a crash takes the last
    changes, or damage takes all. If `is_kept` is true, only the file has the entries, so a rewrite copies them; the
    daemon has all entries of the other databases and writes them again. If `checks_itself` is true, each row has a
    checksum of its own. If `names_blocks` is true, a block's key is at the end of an entry's key."""

    name: str
    holds: str
    form: str
    saved: str
    lost: str
    is_kept: bool = False
    checks_itself: bool = False
    names_blocks: bool = False


EVERY = "every 5 s where it changed"
_ROWS = "container and number of 64 slots → 64 rows of 22 bytes, each with 8 bytes of a hash of its block's key"
DATABASES = (
    Database(
        "about", "the format, the version that wrote it, and whether the daemon before ended in order", "name → text",
        "at the start and the stop", "it is set aside",
    ),
    Database(
        "usage", "uses of blocks on NVMe, by slot: how often, when last", _ROWS, EVERY,
        "blocks begin with no record of their use", checks_itself=True,
    ),
    Database(
        "usage-memory", "the same of blocks in DRAM alone, which a warm restart finds", _ROWS, EVERY,
        "as above", checks_itself=True,
    ),
    Database(
        "learned", "what policies and the predictor learned, and why blocks went; names blocks by key",
        "table and number of a piece → an array", "every 5 s, more rarely where it is large", "they begin anew",
    ),
    Database(
        "removed", "blocks that were deleted since the last rewrite: a killed daemon's successor forgets them again",
        "hash of the tenant and key of the block → nothing", "right after a deletion", "`learned` may name them",
        names_blocks=True,
    ),
    Database(
        "names", "names of tenants that have blocks, and of fingerprints, for people",
        '"tenant:" and name → nothing; "fingerprint:" and digest → canonical JSON', EVERY,
        "listings show digests until clients reconnect",
    ),
    Database("quarantine", "why slots are in quarantine", "place of the slot → reason", EVERY, "the reasons"),
    Database(
        "endurance", "the rest of the endurance budget", '"budget" → JSON',
        "synced before an allotment is spent; the stop", "the budget begins empty", is_kept=True,
    ),
    Database(
        "scrub", "the scrubber's place", '"position" → JSON', EVERY, "the pass begins at the front",
    ),
    Database(
        "pins", "pins, and what touches and later puts changed of expiry and priority",
        "tenant and key of the block → expiry, priority, owners of pins",
        "every 5 s, and before a put that needs it is durable; synced", "pins; expiry and priority are the first put's",
        is_kept=True, names_blocks=True,
    ),
    Database(
        "objects", "the catalogue of objects: names, versions, and the blocks of their manifests",
        "tenant, name and version → `ObjectVersion`", "before the put is answered; synced",
        "their names: put them again; parts that are stored are not written again", is_kept=True,
    ),
    Database(
        "tenants", "settings of tenants by `kvctl tenants set`", "name of the tenant → JSON",
        "before the call is answered; synced", "these settings: the file's hold", is_kept=True,
    ),
    Database(
        "weights", "the newest version of each namespace of weights", "tenant and namespace → number",
        "before a bump is answered; synced", "which version is the newest; no block of another is served for it",
        is_kept=True,
    ),
)  # fmt: skip
BY_NAME = {database.name: database for database in DATABASES}


def page() -> str:
    """Return the table of databases in docs/state-directory.md, as Markdown."""
    lines = ["| database | what is in it | key → value | saved | lost with it |", "|---|---|---|---|---|"]
    lines += [f"| `{each.name}` | {each.holds} | {each.form} | {each.saved} | {each.lost} |" for each in DATABASES]
    return "\n".join(lines)
