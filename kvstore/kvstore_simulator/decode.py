"""Decoding with K and V in slow memory and a scratch of fast memory: bytes read, scratch hits, and the time that is
exposed, token by token.

The baseline copies all pages of a layer into the scratch, whenever a token needs them. Orchestrated reads the bounds of
all pages and copies the selected ones; what the scratch keeps of them until the next token is decided by the daemon's
own residency and policy. With overlap, pages are copied while the processor computes what is between two attentions:
the bounds, and the pages that the layer selected for the token before. The rest is copied when the selection is known.

The time model is a line of constant rate behind a latency. What has begun too early gives way to what is needed, so
overlap never makes a token slower. Weights stream from the engine's own memory: if the pages are there too, overlap has
what the weights leave of it. The rest of the model is `Machine`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore_simulator.machine import Machine, MediumSpec
from kvstore_simulator.page_trace import PageStep, PageTrace
from kvstore_simulator.policies import create
from kvstore_tiers.base import Slot
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency

TIER = 0
BASELINE, ORCHESTRATED = "baseline", "orchestrated"
_STAGED_LAYERS = 2  # what attention reads now, and what is copied for the next one


class Scratch:
    """The pages that are in fast memory from one token to the next, at most `capacity_pages`, by the daemon's policy
    `policy`. A place that becomes free is used again two layers later: attention may still read it, while pages are
    copied for the next layer.
    """

    def __init__(self, capacity_pages: int, page_bytes: int, policy: str) -> None:
        self.residency = Residency(("scratch",))
        self._policy = create(policy, self.residency, TIER)
        self._capacity_pages, self._page_bytes = capacity_pages, page_bytes
        self._tenant = self.residency.tenant("decode")
        self._free: list[Slot] = []
        self._left: list[Slot] = []  # since the last layer
        self.places = 0

    def held(self, layer: int, pages: Iterable[int]) -> set[int]:
        """Return which of the `pages` of `layer` are in the scratch."""
        find, tenant = self.residency.find, self._tenant
        return {page for page in pages if find(tenant, _key(layer, page)) >= 0}

    def use(self, layer: int, pages: Sequence[int], now_ns: int) -> list[int]:
        """Return the places of `pages` of `layer`, which are read now, and let the policy choose what remains."""
        residency = self.residency
        rows = [self._row(_key(layer, page), now_ns) for page in pages]
        places = [residency.slot(row, TIER).offset for row in rows]
        residency.touch_run(rows, now_ns)
        over = residency.tier_blocks(TIER) - self._capacity_pages
        self._free += self._left
        self._left = []
        if over > 0:
            victim = self._policy.next_victim
            self._left = residency.remove_chosen(TIER, victim, over, Cause.EVICTED, now_ns)
        return places

    def _row(self, key: bytes, now_ns: int) -> int:
        """Return the row of a page that is in the scratch now. No page continues another, as blocks of a chain do."""
        row = self.residency.find(self._tenant, key)
        if row >= 0:
            return row
        if not self._free:
            self._free.append(Slot(0, self.places, self._page_bytes, 1))
            self.places += 1
        (row,) = self.residency.store_run(
            self._tenant, [key], -1, TIER, [self._free.pop()],
            fingerprint_id=0, group=0, payload_bytes=self._page_bytes, now_ns=now_ns,
        )  # fmt: skip
        return row


def _key(layer: int, page: int) -> bytes:
    return layer.to_bytes(8, "big") + page.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The way from slow memory into the scratch: bytes a second behind a latency. With `overlaps`, transfers begin
    before they are needed.
    """

    bytes_per_s: float
    latency_s: float
    overlaps: bool

    def early_bytes(self, idle_s: float) -> float:
        """Return the bytes that arrive in a time of `idle_s` seconds in which nothing waits for them."""
        return max(0.0, idle_s - self.latency_s) * self.bytes_per_s if self.overlaps else 0.0

    def wait_s(self, nbytes: float) -> float:
        """Return the seconds until `nbytes` arrive that are needed now."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LayerRead:
    """One layer's read of K and V for one token: bytes out of the scratch, bytes out of slow memory into it, pages, how
    many of them the scratch held, and of how many pages the bounds were compared. Computing waited for `wait_s`.
    """

    read_bytes: float
    slow_bytes: float
    pages: int
    hits: int
    compared: int
    wait_s: float


def read_all(pages: int, page_bytes: int, link: SlowLink, idle_s: float) -> LayerRead:
    """Return the read of all pages of a layer. The link has nothing else to do for `idle_s` seconds before."""
    nbytes = pages * page_bytes
    late = max(0.0, nbytes - link.early_bytes(idle_s))
    return LayerRead(nbytes, nbytes, pages, 0, 0, link.wait_s(late))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The pages that one layer reads for one token, and their places in the scratch. `held` of them are there before;
    `likely` are pages that are not and that the token before read: they may be copied early. The bounds of `compared`
    pages are read first.
    """

    pages: Sequence[int]
    places: Sequence[int]
    held: frozenset[int]
    likely: Sequence[int]
    compared: int


def plans_of(trace: PageTrace, scratch: Scratch) -> list[list[LayerPlan]]:
    """Return the plan of each layer, for each token of `trace`. A layer that would read no less with its selection
    reads all pages, and no bounds. `likely` is cut so that early copies in vain read no more than that either.
    """
    made: list[list[LayerPlan]] = []
    before: PageStep | None = None
    now_ns = 0
    for step in trace.steps:
        layers = []
        for layer, selected in enumerate(step.selected):
            now_ns += 1
            pages: Sequence[int] = selected
            likely: Sequence[int] = before.selected[layer] if before is not None else ()
            compared = step.pages
            spare = (step.pages - len(selected)) * trace.page_bytes - compared * trace.bound_bytes
            if spare <= 0:
                pages = likely = range(step.pages)
                compared, spare = 0, step.pages * trace.page_bytes
            held = scratch.held(layer, {*pages, *likely})
            early = [page for page in likely if page not in held][: spare // trace.page_bytes]
            places = scratch.use(layer, pages, now_ns)
            layers.append(LayerPlan(pages, places, frozenset(held), early, compared))
        made.append(layers)
        before = step
    return made


def read_selected(trace: PageTrace, plan: LayerPlan, link: SlowLink, idle_s: float) -> LayerRead:
    """Return the read of one layer by `plan`. The link has nothing else to do for `idle_s` seconds before."""
    page_bytes, bound_bytes = trace.page_bytes, plan.compared * trace.bound_bytes
    early_bytes = link.early_bytes(idle_s)
    fetched = plan.likely[: int(max(0.0, early_bytes - bound_bytes) // page_bytes)]
    missing = [page for page in plan.pages if page not in plan.held]
    late = len(missing) - len({*fetched} & {*missing})
    return LayerRead(
        bound_bytes + len(plan.pages) * page_bytes,
        bound_bytes + (len(fetched) + late) * page_bytes,
        len(plan.pages),
        len(plan.pages) - len(missing),
        plan.compared,
        link.wait_s(bound_bytes - early_bytes) + link.wait_s(late * page_bytes),
    )


@dataclass(slots=True)
class TokenCost:
    """The sums over all layers for one token. `seconds` is the token's time; `exposed_s` of it is neither attention nor
    what is between two attentions, but waiting for bytes and choosing pages.
    """

    read_bytes: float = 0.0
    slow_bytes: float = 0.0
    pages: int = 0
    hits: int = 0
    exposed_s: float = 0.0
    seconds: float = 0.0

    def add(self, read: LayerRead, exposed_s: float, computing_s: float) -> None:
        self.read_bytes += read.read_bytes
        self.slow_bytes += read.slow_bytes
        self.pages += read.pages
        self.hits += read.hits
        self.exposed_s += exposed_s
        self.seconds += computing_s + exposed_s


@dataclass(slots=True)
class DecodeRow:
    """One row of the table: a way of reading K and V from the medium `slow`, with the costs of each token."""

    slow: str
    plan: str
    policy: str
    overlaps: bool
    tokens: list[TokenCost] = field(default_factory=list)

    def sum(self, what: str) -> float:
        return float(sum(getattr(token, what) for token in self.tokens))

    def as_json(self, baseline: DecodeRow) -> dict[str, Any]:
        """Return the row for machines. Ratios are to `baseline`, of the same medium and overlap."""
        sums = {name: self.sum(name) for name in ("read_bytes", "slow_bytes", "exposed_s", "seconds")}
        ratios = {f"{name}_ratio": _ratio(total, baseline.sum(name)) for name, total in sums.items()}
        return {
            "slow": self.slow, "plan": self.plan, "policy": self.policy, "overlap": self.overlaps,
            "scratch_hits": self.sum("hits") / self.sum("pages"), **sums, **ratios,
            "tokens": [asdict(token) for token in self.tokens],
        }  # fmt: skip


def _ratio(value: float, baseline: float) -> float | None:
    return value / baseline if baseline else None


@dataclass(frozen=True, slots=True)
class DecodeStudy:
    """A study that decodes `trace` on `machine` with a scratch of `scratch_bytes`, once from each medium in `slow`, as
    the baseline and orchestrated by each of `policies`.
    """

    trace: PageTrace
    machine: Machine
    scratch_bytes: int
    slow: Sequence[MediumSpec]
    policies: Sequence[str]

    @property
    def kept_pages(self) -> int:
        """The pages that the scratch can keep, beside the ones that attention reads now and next."""
        pages = self.scratch_bytes // self.trace.page_bytes
        widest = max(len(selected) for step in self.trace.steps for selected in step.selected)
        return int(pages - min(pages // 2, _STAGED_LAYERS * widest))

    def rows(self) -> Iterator[DecodeRow]:
        """Yield the rows: for each medium the baseline and then orchestrated, without overlap and with it."""
        page_bytes = self.trace.page_bytes
        plans = {name: plans_of(self.trace, Scratch(self.kept_pages, page_bytes, name)) for name in self.policies}
        for medium in self.slow:
            for policy in ("", *self.policies):
                for overlaps in (False, True):
                    plan = ORCHESTRATED if policy else BASELINE
                    yield self._row(medium, DecodeRow(medium.name, plan, policy, overlaps), plans.get(policy))

    def _row(self, medium: MediumSpec, row: DecodeRow, plans: Sequence[Sequence[LayerPlan]] | None) -> DecodeRow:
        trace = self.trace
        link = SlowLink(medium.read_bytes_per_s, medium.latency_s, row.overlaps)
        dense_s, weights_s = self._dense_s()
        idle_s = dense_s - weights_s if medium.name == self.machine.engine_tier else dense_s
        attended_s = 0.0
        for number, step in enumerate(trace.steps):
            token = TokenCost()
            for layer in range(trace.model.layers):
                if plans is None:
                    read = read_all(step.pages, trace.page_bytes, link, idle_s + attended_s)
                else:
                    read = read_selected(trace, plans[number][layer], link, idle_s + attended_s)
                attended_s = self._over_pages_s(trace.block_tokens * read.pages, read.pages * trace.page_bytes)
                choosing_s = self._over_pages_s(read.compared, read.compared * trace.bound_bytes)
                token.add(read, read.wait_s + choosing_s, dense_s + attended_s)
            row.tokens.append(token)
        return row

    def _dense_s(self) -> tuple[float, float]:
        """Return the seconds of what a layer computes beside attention, and of reading its weights meanwhile."""
        model, machine = self.trace.model, self.machine
        weights_s = model.weight_bytes / model.layers / machine.media[machine.engine_tier].read_bytes_per_s
        return max(weights_s, self._computing_s(2 * model.parameters / model.layers)), weights_s

    def _over_pages_s(self, rows: int, nbytes: int) -> float:
        """Return the seconds in which the query heads of a layer pass over `rows` pairs of vectors of `nbytes`, which
        are in the scratch: K and V of tokens, or bounds.
        """
        model = self.trace.model
        flops_s = self._computing_s(4.0 * model.heads / model.kv_heads * model.head_dim * rows)
        return max(nbytes / self.machine.media["sram"].read_bytes_per_s, flops_s)

    def _computing_s(self, flops: float) -> float:
        return flops / (self.machine.compute.flops_per_s * self.machine.compute.efficiency)
