"""Fit the model file that ships with the policy chain-hazard, on traces.

    benchmarks/fit_chain_hazard.py --chat conversation.jsonl.gz --chat arxiv.jsonl.gz --agent claude_code.jsonl.gz \
        --write predictor/kvstore_predictor/chain_hazard.json

Each trace is replayed once with the production policy, learning without forgetting, in a tier so large that little is
evicted; the counts of its hazard tables are the model. Chat traces are Mooncake's format; of agent traces (Claude
Code's format) every seed of --seeds draws other session starts, and counts are divided by their number.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstore_predictor.ladders import Ladder
from kvstore_predictor.prior import Prior, write
from kvstore_simulator.policies import POLICIES
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import PolicySettings
from kvstored.store.policies.chain_hazard import ChainHazard
from kvstored.store.policies.chains.follower import BY_SHAPE, UNTRAINED_ORDERS, LearningSettings

_ROOMY = 0.2
_LEAST_USES = 4


NAME = "chain-hazard-fitting"
PRIOR_ORDERS = {  # what is known only later, the answer, comes last
    "chat": (BY_SHAPE, ("kind", "text", "length", "answer")),
    "agent": (("kind", "pace", "gap", "new_blocks", "answer"), ("kind", "gap", "pace", "text", "answer")),
}


def _empty_tables() -> list[Ladder]:
    orders = dict.fromkeys((*UNTRAINED_ORDERS, *(order for orders in PRIOR_ORDERS.values() for order in orders)))
    return [Ladder(order) for order in orders]


def fitting(
    residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = NAME
) -> ChainHazard:
    """Starts from nothing, forgets nothing, and needs no guard."""
    learning = LearningSettings(_empty_tables, is_guarded=False, forgets=False)
    return ChainHazard(residency, tier, settings, name=name, learning=learning)


def counts_of(traces: list[Trace], workload: str) -> list[Prior]:
    """Return what the policy learns on these traces, one prior for each of the workload's orders."""
    wanted = PRIOR_ORDERS[workload]
    priors = [Prior(workload, order, {}) for order in wanted]
    for trace in traces:
        replay = Replay(trace, ReplaySettings(NAME, max(1, round(trace.distinct_blocks * _ROOMY))))
        replay.run()
        assert isinstance(replay.policy, ChainHazard)
        seen = {ladder.order: ladder.counts for ladder in replay.policy.follower.book.tables.counts()}
        for prior in priors:
            for path, counts in seen[prior.order].items():
                prior.counts[path] = prior.counts.get(path, 0.0) + counts
    return priors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, action="append", default=[], metavar="TRACE")
    parser.add_argument("--agent", type=Path, action="append", default=[], metavar="TRACE")
    parser.add_argument("--seeds", type=int, default=2, help="draws of session starts for agent traces")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE.json")
    arguments = parser.parse_args()
    POLICIES[NAME] = f"{__name__}:{fitting.__name__}"
    chat = [read_trace(path, "mooncake", ReadOptions(), lambda *_: None) for path in arguments.chat]
    agent = [
        read_trace(path, "claude-code", ReadOptions(seed=seed), lambda *_: None)
        for path in arguments.agent
        for seed in range(arguments.seeds)
    ]
    priors = counts_of(chat, "chat")
    for prior in counts_of(agent, "agent"):
        priors.append(prior._replace(counts={path: seen / arguments.seeds for path, seen in prior.counts.items()}))
    card = {
        "what": "Hazard tables of session chains: chains exposed and used again, by class and age bin.",
        "trained_on": {
            trace.name: {"requests": trace.requests, "blocks": trace.distinct_blocks} for trace in [*chat, *agent]
        },
        "fitted_by": "benchmarks/fit_chain_hazard.py",
        "used_for": "Where the tables of the policy chain-hazard start from; what they learn on site takes over.",
        "personal_data": "None: counts by buckets of lengths and times.",
    }
    arguments.write.write_text(write(card, priors, least=_LEAST_USES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
