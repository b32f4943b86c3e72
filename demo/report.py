"""Reports what was measured, as a table for people and as one object for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from demo.first_light import Result
from demo.next_turn import Turn

_LABELS = {
    "cold": "cold",
    "dram": "warm from DRAM",
    "nvme": "warm from NVMe",
    "restart": "after kill -9",
    "damaged": "damaged block",
}


def as_text(result: Result, turn: Turn) -> str:
    cold = result.answer("cold")
    lines = [
        "",
        f"{'':16}{'TTFT':>10}{'speed-up':>10}{'restored':>10}{'computed':>10}{'from DRAM':>12}{'from NVMe':>12}",
    ]
    for answer in result.answers:
        lines.append(
            f"{_LABELS[answer.name]:16}{answer.ttft_s * 1000:>7.0f} ms{cold.ttft_s / answer.ttft_s:>9.1f}x"
            f"{answer.restored_tokens:>10}{answer.computed_tokens:>10}"
            f"{answer.host_bytes / 1e6:>9.1f} MB{answer.nvme_bytes / 1e6:>9.1f} MB"
        )
    verdict = "identical, token for token" if result.identical else "NOT identical"
    damage = "detected, quarantined and recomputed" if result.corruption_detected else "NOT detected"
    brought = f"{turn.used_blocks} of {turn.blocks} blocks had left DRAM and were back in time"
    if turn.nothing_missing:
        brought = f"none of the {turn.demoted_blocks} blocks that had left DRAM was needed"
    lines += [
        "",
        f"answers: {verdict}      damaged block: {damage}      K/V bytes inside gRPC: {result.grpc_payload_bytes}",
        f"predicted turn: {turn.ttft_s * 1000:.0f} ms ({turn.first_ttft_s * 1000:.0f} ms at the first turn), "
        f"{turn.host_bytes / 1e6:.1f} MB from DRAM, {turn.nvme_bytes / 1e6:.1f} MB waited for; {brought}, "
        f"{turn.late_blocks} late, {turn.wasted_blocks} wasted",
        f"daemon: ready in {result.ready_s:.2f} s, {result.idle_rss_bytes / 1e6:.0f} MB resident when idle",
        "",
        "$ kvctl tiers",
        result.tiers_table.rstrip(),
        "",
        "$ kvctl blocks --limit 4",
        result.blocks_table.rstrip(),
    ]
    return "\n".join(lines)


def as_json(result: Result, turn: Turn) -> dict[str, Any]:
    cold, dram, nvme, restart = (result.answer(name) for name in ("cold", "dram", "nvme", "restart"))
    return {
        "model": result.model,
        "ttft_cold_s": cold.ttft_s,
        "ttft_warm_dram_s": dram.ttft_s,
        "ttft_warm_nvme_s": nvme.ttft_s,
        "ttft_warm_restart_s": restart.ttft_s,
        "prefix_tokens": cold.prompt_tokens,
        "tokens_restored": dram.restored_tokens,
        "nvme_bytes_read": nvme.nvme_bytes,
        "outputs": [answer.text for answer in (cold, dram, nvme, restart)],
        "outputs_identical": result.identical,
        "corruption_detected": result.corruption_detected,
        "daemon_ready_s": result.ready_s,
        "daemon_restart_ready_s": result.restart_ready_s,
        "daemon_idle_rss_bytes": result.idle_rss_bytes,
        "prefill_tokens_per_s": cold.computed_tokens / cold.prefill_s,
        "grpc_payload_bytes": result.grpc_payload_bytes,
        "next_turn": asdict(turn),
        "answers": [
            {
                "name": answer.name,
                "ttft_s": answer.ttft_s,
                "tokens_restored": answer.restored_tokens,
                "tokens_computed": answer.computed_tokens,
                "dram_bytes": answer.host_bytes,
                "nvme_bytes": answer.nvme_bytes,
                "text": answer.text,
            }
            for answer in result.answers
        ],
    }
