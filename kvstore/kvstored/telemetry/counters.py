"""Monotonic counters by name. The names are fixed here and documented; `kvctl status` shows them."""

from __future__ import annotations

COUNTERS = {
    "lookups": "lookup requests answered",
    "lookup_keys": "keys asked for in lookups",
    "lookup_hit_keys": "keys found usable in lookups",
    "acquires": "acquire requests answered",
    "acquired_blocks": "blocks handed out under leases",
    "acquired_tokens": "tokens whose K/V those hold: once, however many layer groups a model has",
    "acquire_timeouts": "acquires that ended before their promotions",
    "stored_blocks": "blocks copied, checked and published",
    "stored_bytes": "payload bytes of those",
    "present_blocks": "puts of blocks that were there already",
    "no_room_blocks": "puts refused: DRAM was full, and nothing in it might be evicted",
    "over_quota_blocks": "puts refused: the tenant was at its maximum, and none of its own blocks might be evicted",
    "declined_blocks": "puts refused by the policy: worth less than what would have had to go",
    "durable_blocks": "blocks answered durable",
    "promoted_blocks": "blocks moved up for an acquire or a prefetch",
    "promoted_bytes": "bytes of those",
    "prefetched_blocks": "blocks moved up by prefetch alone",
    "predicted_blocks": "blocks moved up because a predictor expected a request for them",
    "predicted_used_blocks": "of those, blocks that were there when a request came",
    "predicted_late_blocks": "of those, blocks for which a request came while they were being moved",
    "predicted_wasted_blocks": "of those, blocks that were evicted before a request came, or for which none came",
    "written_back_blocks": "blocks written to NVMe",
    "written_back_bytes": "bytes of those",
    "coded_blocks": "blocks brought into the form of a tier's codec",
    "coded_bytes": "bytes of their payloads",
    "coded_stored_bytes": "bytes of that form",
    "refused_coding_blocks": 'blocks stored as they are since the choice "auto" found no codec that pays',
    "refused_lossy_blocks": "blocks stored as they are under a lossy codec: their put or tenant did not accept it",
    "replaced_lossy_copies": "lossy copies taken away since an exact put of their block came",
    "uncoded_blocks": "blocks stored as they are in a tier with a codec: not smaller, or too large to be staged",
    "endurance_bytes": "bytes charged for writes to NVMe: slots, records and commits",
    "endurance_spent_times": "how often the endurance budget ran out",
    "admission_refused_blocks": "blocks left volatile: not worth a write to NVMe",
    "budget_refused_blocks": "blocks left volatile: the endurance budget was spent, scarce, or had by others",
    "budget_throttled_blocks": "puts in mode always that had to wait for the endurance budget",
    "shed_blocks": "blocks left volatile: NVMe was degraded, or too far behind",
    "degraded_transitions": "how often a tier went into a degraded mode",
    "degraded_recoveries": "how often one came back",
    "tier_probes": "scratch writes and reads of a degraded medium",
    "tier_probe_failures": "those that failed",
    "given_up_blocks": "blocks whose slot could not be read twice, taken out of use",
    "host_shrunk_bytes": "DRAM given back under memory pressure",
    "evicted_blocks": "blocks that left their last tier by policy",
    "relocated_blocks": "blocks copied to another slot of their tier, so that an arena or slab could be emptied",
    "relocated_bytes": "bytes of those slots",
    "expired_blocks": "blocks that left by their time to live",
    "corrupt_blocks": "copies of blocks found damaged and taken out of use",
    "unreadable_blocks": "copies of blocks given up since this build does not have their codec",
    "forgotten_blocks": "copies that a key-addressed tier no longer had, or that memory could not give back",
    "discovery_declined": "requests with blocks unknown here for which asking key-addressed tiers would not have paid",
    "discovery_known_absent": "of those, requests that were not asked for: the tiers had just said no",
    "discovery_questions": "blocks that key-addressed tiers were asked for, unknown here",
    "discovery_timeouts": "requests that waited for such a question until its deadline, in vain",
    "discovered_blocks": "blocks that others had stored and were found that way",
    "shared_blocks": "blocks copied from DRAM to a key-addressed tier for other nodes, before they were evicted",
    "device_blocks": "blocks copied from DRAM to a tier that stands before it, since they are used often",
    "device_declined_blocks": "blocks not copied there, since the blocks that would leave for them are used as often",
    "device_rate_waits": "times that such copies waited until the byte rate of that tier allowed more",
    "straight_blocks": "blocks read from NVMe to such a tier, past DRAM, for a request of an engine on that device",
    "remote_unworthy_blocks": "evicted blocks that were not worth a write to a key-addressed tier",
    "remote_over_rate_blocks": "evicted blocks not written there because the byte rate was spent",
    "orphaned_blocks": "children of damaged blocks, cut off with them",
    "scrubbed_bytes": "bytes that the scrubber has read",
    "scrub_corrupt": "damaged slots that the scrubber found first",
    "verified_reads": "DRAM copies checksummed before a lease was given on them",
    "broken_invariants": "findings of the daemon's walk over its own books: always 0",
    "read_failures": "reads that a tier refused",
    "write_failures": "writes that a tier refused",
    "expired_leases": "leases that lapsed",
    "shed_prefetches": "prefetches refused because too much was under way",
    "shed_puts": "puts refused because too much was under way; a client sends them again",
    "throttled_requests": "gets and other requests refused because too much of their own tenant was under way",
    "lease_limit_refusals": "gets throttled because their client held limits.leases_per_client leases",
    "sessions_opened": "handshakes that succeeded",
    "sessions_refused": "handshakes that did not",
    "warm_blocks": "blocks in memory, DRAM or a GPU's, taken over from the daemon before",
    "warm_dropped_arenas": "its arenas, and chunks of GPU memory, that could not be taken over",
    "warm_dropped_slots": "its slots whose header did not hold, or whose block was there twice",
    "warm_leases": "leases of clients that came back from it and have them again",
    "published_events": "KV events sent to subscribers",
    "replayed_batches": "batches of KV events sent again to subscribers that asked",
    "event_snapshots": "those that were the whole state instead, since older batches were gone",
    "event_restarts": "how often the process that publishes KV events was started again",
    "traced_spans": "spans sent to the collector of traces",
    "dropped_spans": "spans not sent: the queue was full, or the collector did not take them",
    "grpc_payload_bytes": "bytes of K/V that travelled inside gRPC: 0 but for unary calls",
}


class Counters:
    """The daemon's counters, by name. Only the names in `COUNTERS` exist; any other raises KeyError."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)
