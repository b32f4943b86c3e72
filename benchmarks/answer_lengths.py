"""What do the lengths of prompts and answers that engines report add to the hit ratio?

Hit ratios of the policy when a trace is driven as a daemon sees it: each request is a get of its blocks and a put of
those that it missed, for which room is made block by block. The policy knows no lengths; or the length of each
prompt, which a get carries; or also the length of each answer, which our connectors send as a hint when it has ended.
Beside them LRU, which uses no lengths, and the policy in the simulator's own order, which knows both and stores before
it evicts.

Expected: how long an answer was says when the next turn comes, and how much of a prompt its user wrote. On published
chats the oracles of `policy_study.py` saw some percent of the hits in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from support.daemons_order import in_daemons_order, with_answers, without_prompts
from support.report import Row, progress, table

from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace
from kvstored.store.policies import resolve


def configurations(trace: Trace) -> Iterator[tuple[str, str, Trace]]:
    """The compared configurations: a name, the policy, the trace."""
    ordered = in_daemons_order(trace)
    yield "lru", "lru", ordered
    yield "nothing", "best", without_prompts(ordered)
    yield "prompts", "best", ordered
    yield "answers", "best", with_answers(ordered)
    yield "simulator", "best", trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="with lengths of prompts and answers")
    parser.add_argument("--format", default="mooncake")
    parser.add_argument("--capacity", default="0.01,0.05,0.1", help="shares of the distinct blocks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for path in options.traces:
        trace = read_trace(path, options.format, ReadOptions(), lambda done, total: None)
        compared = list(configurations(trace))
        for capacity in map(float, options.capacity.split(",")):
            blocks, ratios = round(capacity * trace.distinct_blocks), {}
            for name, policy, ordered in compared:
                hits = Replay(ordered, ReplaySettings(resolve(policy), blocks)).run().hits.sum()
                ratios[name] = float(hits) / trace.accesses
                row = f"{path.name.split('.')[0]}_{capacity:g}_{name}"
                rows.append(Row(row, ratios[name], "hit ratio", ratios["lru"], "lru"))
            progress(f"{path.name} {capacity:g}: " + ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items()))
    objects = [row.as_json() for row in rows]
    print(json.dumps(objects) if options.json else table(objects))
    return 0


if __name__ == "__main__":
    sys.exit(main())
