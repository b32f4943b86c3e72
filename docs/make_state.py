"""Writes docs/state-directory.md from the code that owns what it says: `make docs`.

`kvstored.state.databases` lists the databases; a test compares the file with a fresh run.
"""

from __future__ import annotations

from pathlib import Path

from kvstored.clients.tenants.listed_users import LISTING_FILE
from kvstored.lifetime.instance import OLD_FILES, OLD_VERSION
from kvstored.state.databases import FORMAT
from kvstored.state.databases import page as databases
from kvstored.state.environment import ASIDE, NEW, PREFIX, SUFFIX
from kvstored.state.process import DEATHS, DEATHS_IN_S
from kvstored.state.saver import INTERVAL_S, REWRITE_S
from kvstored.state.terms import MARK, START_S

TARGET = Path(__file__).with_name("state-directory.md")
_PAGE = """# The state directory

Rendered by `make docs` from the code. `STATE_DIR` is `daemon.state_dir`; every file in it is mode 0600.

| name | what |
|---|---|
| `secret`, `identity.json` | [the secret](kvstored.md#the-secret) behind all keys, and its check value; plain files |
| `{listing}` | who may map whose memory: [who is listed no more](threat-model.md) sees no later block |
| `keys` | the keys [at rest](kvstored.md#encryption-at-rest), under the master key |
| `{prefix}NUMBER{suffix}`, `…-lock` | small state: one LMDB environment, format {format}; the highest number counts |
| `{aside}` | what was set aside, one file at most; removed when blocks are deleted |
| `…{new}` | not whole yet; removed by the next start |
| `{mark}` | empty; while it is there, a start waits for [pins and later terms](policies.md#how-long-blocks-are-kept) |
| `events.json` | the epoch of [KV events](events.md), which their process needs before it starts |
| `lock`, `holder.sock` | one daemon a directory; [who keeps DRAM](warm-restart.md) |
| `nvme/` | the slabs ([format.md](format.md)), unless `nvme.path` is elsewhere; **the truth about blocks** |

## Small state

{databases}

It may be deleted while no daemon runs: that costs hits, labels, pins, changed terms and (removed, not damaged) a full
endurance budget, no block.

- A process of its own has it open, and the daemon never loads LMDB: a damaged page or a disk that fails under a
  mapping ends that process, not the daemon. `kvctl state ls` shows its number and memory.
- The daemon serves before it is read, but for `pins`, which it gives {start:g} s. No request waits for it. Until it is
  read, policies go by the order of what came since, and of the endurance budget nothing is spent.
- What changed is committed every {interval:g} s, or later where `daemon.state_rate` bytes a second do not suffice
  or collecting it would take more than 2 % of a core; a crash forgets what came since. Each commit is there as a
  whole or not at all. After a loss of power the last one may be missing, but not of `pins` or the endurance budget.
- Before it is opened its pages are walked without LMDB (`lmdb verify`). One that is damaged, full or of another
  format is set aside and named in one line, and begins anew. So is one whose process has died {deaths} times within
  {deaths_in:g} s: a page that is damaged while it is open ends the process twice at most.
- Each value has a checksum, taken with its database and key; a row of use has one of its own. With a master key all but
  `about` is encrypted and authenticated instead; each file has a key, destroyed with it. Wrong values are counted
  (`kvctl state ls`) and not used.
- **What was deleted is unreadable within 60 s.** A deleted key may stay in an LMDB page, so everything is written anew
  into a file of the next number, once for all deletions of {rewrite:g} s and once at the start after a kill;
  the file before is removed. A name of a tenant without blocks goes with it. Until then `removed` has the key,
  so that tables saved before bring nothing back after a kill; one before that commit, of milliseconds, may. Records in
  freed slots of slabs are [another matter](format.md).

`kvctl state ls`, `kvctl state show DATABASE` ask the daemon; with `--state-dir`, and `kvstored inspect STATE_DIR
state [DATABASE]`, the file is read, beside a daemon too, unless it is encrypted. `--copy DIR` writes a
[backup](operations.md#backup).

## Files of before

{old} of {version} and before are not read. A start that finds them names them and stops; move them away, or start
once with `--discard-old`, which removes them. Blocks stay.
"""


def page() -> str:
    return _PAGE.format(
        listing=LISTING_FILE, prefix=PREFIX, suffix=SUFFIX, aside=ASIDE, new=NEW, format=FORMAT,
        databases=databases(), interval=INTERVAL_S, rewrite=REWRITE_S, mark=MARK, start=START_S, deaths=DEATHS,
        deaths_in=DEATHS_IN_S, version=OLD_VERSION, old=", ".join(f"`{name}`" for name in OLD_FILES),
    )  # fmt: skip


if __name__ == "__main__":
    TARGET.write_text(page())
