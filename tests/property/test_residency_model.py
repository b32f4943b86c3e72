"""Residency against a plain model: dictionaries and loops that anyone can check by eye."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_proto.arena import BlockHeader
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.recovered import as_columns
from kvstored.lifecycle import BY_CHOICE, Cause
from kvstored.store.blocks import CyclicChainError, RowKind
from kvstored.store.blocks.adoption import adopt
from kvstored.store.blocks.check import check
from kvstored.store.blocks.columns import OF_BLOCKS, OF_COPIES, Column
from tests.reference.blocks import BLOCK_BYTES, Shelf, key, pack
from tests.reference.examples import examples

TIERS = ("host", "nvme")
BLOCKS = 8
numbers = st.integers(0, BLOCKS - 1)
tenants = st.integers(0, 1)
tiers = st.integers(0, len(TIERS) - 1)
causes = st.sampled_from([Cause.EVICTED, Cause.EXPIRED, Cause.CORRUPT, Cause.DROPPED])

Name = tuple[int, int]  # tenant, block number


@dataclass
class Block:
    copies: dict[int, str] = field(default_factory=dict)  # tier → filling | resident
    parent: int | None = None
    pins: int = 0
    facts: dict[str, int] = field(default_factory=dict)  # in optional columns of blocks
    of_copies: dict[tuple[int, str], int] = field(default_factory=dict)  # ... of copies, by tier

    def readable(self) -> bool:
        return any(state != "filling" for state in self.copies.values())

    def keep_what_copies_say(self) -> None:
        self.of_copies = {at: value for at, value in self.of_copies.items() if at[0] in self.copies}


class ResidencyAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(*TIERS, tenants=2, ghost_keys=4)
        self.residency = self.shelf.residency
        self.blocks: dict[Name, Block] = {}  # those with a row
        self.gone: list[tuple[Name, Cause]] = []  # oldest first
        self.tokens: dict[Name, int] = {}

    # The model

    def children(self, name: Name) -> list[Name]:
        tenant, number = name
        return [other for other, block in self.blocks.items() if other[0] == tenant and block.parent == number]

    def prune(self) -> None:
        """Rows without copies live only under children."""
        while empty := [name for name, b in self.blocks.items() if not b.copies and not self.children(name)]:
            for name in empty:
                del self.blocks[name]

    def closes_cycle(self, name: Name, parent: int | None) -> bool:
        while parent is not None:
            if parent == name[1]:
                return True
            block = self.blocks.get((name[0], parent))
            parent = None if block is None else block.parent
        return False

    def row(self, name: Name) -> int:
        return self.residency.find_any(name[0], key(name[1]))

    # What can happen

    @rule(tenant=tenants, number=numbers, parent=st.none() | numbers, tier=tiers, filling=st.booleans())
    def store(self, tenant: int, number: int, parent: int | None, tier: int, filling: bool) -> None:
        name = (tenant, number)
        block = self.blocks.get(name)
        if block is not None and block.copies:
            return
        if self.closes_cycle(name, parent):
            try:
                self.shelf.insert(number, parent, tenant=tenant)
            except CyclicChainError:
                return
            raise AssertionError("a cycle was let in")
        row = self.shelf.insert(number, parent, tenant=tenant)
        self.residency.attach(row, tier, self.shelf.slot(), 1, filling=filling)
        block = self.blocks.setdefault(name, Block())
        block.parent = parent
        block.copies[tier] = "filling" if filling else "resident"
        if parent is not None:
            self.blocks.setdefault((tenant, parent), Block())
        self.prune()
        self.tokens[name] = self.residency.token(row)

    @rule(
        found=st.dictionaries(
            st.tuples(tenants, numbers), st.tuples(st.none() | numbers, st.integers(0, 3)), max_size=9
        ),
        tier=tiers,
    )
    def adopt(self, found: dict[Name, tuple[int | None, int]], tier: int) -> None:
        """Blocks that come in bulk; what has a row, or is no deeper than its parent, is left to the slow way."""
        names = list(found)
        slots = [self.shelf.slot() for _ in names]
        headers = [
            BlockHeader(
                key(number), NO_PARENT if found[tenant, number][0] is None else key(found[tenant, number][0] or 0),
                bytes(32), bytes([tenant]) * 16, 4096, depth=found[tenant, number][1],
            )
            for tenant, number in names
        ]  # fmt: skip
        blocks = as_columns(zip(slots, headers, strict=True))
        kinds = [RowKind(origin.tenant[0], 7, origin.group) for origin in blocks.origins]
        left_out = {names[position] for position in adopt(self.residency, tier, blocks, kinds, 1)}
        adopted = set(found) - set(self.blocks)
        while twisted := {
            name for name in adopted
            if (above := (name[0], found[name][0])) in adopted and found[name][1] <= found[above][1]  # type: ignore[index]
        }:  # fmt: skip
            adopted -= twisted
        assert left_out == set(found) - adopted
        for name in adopted:
            block = self.blocks.setdefault(name, Block())
            block.parent = found[name][0]
            block.copies[tier] = "resident"
        for name in adopted:
            if found[name][0] is not None:
                self.blocks.setdefault((name[0], found[name][0] or 0), Block())
            self.tokens[name] = self.residency.token(self.row(name))

    @rule(tenant=tenants, number=numbers, tier=tiers, filling=st.booleans())
    def copy(self, tenant: int, number: int, tier: int, filling: bool) -> None:
        block = self.blocks.get((tenant, number))
        if block is None or not block.readable() or tier in block.copies:
            return
        self.residency.attach(self.row((tenant, number)), tier, self.shelf.slot(), 1, filling=filling)
        block.copies[tier] = "filling" if filling else "resident"

    @rule(tenant=tenants, number=numbers, tier=tiers, whole=st.booleans())
    def end_filling(self, tenant: int, number: int, tier: int, whole: bool) -> None:
        block = self.blocks.get((tenant, number), Block())
        if block.copies.get(tier) != "filling":
            return
        row = self.row((tenant, number))
        if whole:
            self.residency.publish(row, tier, 1)
            block.copies[tier] = "resident"
        else:
            self.residency.detach(row, tier)
            del block.copies[tier]
            block.keep_what_copies_say()
            self.prune()

    @rule(tenant=tenants, number=numbers, tier=tiers)
    def detach(self, tenant: int, number: int, tier: int) -> None:
        block = self.blocks.get((tenant, number), Block())
        if block.copies.get(tier) in (None, "filling"):
            return
        others = any(state != "filling" for other, state in block.copies.items() if other != tier)
        try:
            self.residency.detach(self.row((tenant, number)), tier)
        except RuntimeError:
            assert not others
        else:
            assert others
            del block.copies[tier]
            block.keep_what_copies_say()

    @rule(tenant=tenants, number=numbers, cause=causes)
    def remove(self, tenant: int, number: int, cause: Cause) -> None:
        name = (tenant, number)
        block = self.blocks.get(name)
        if block is None or not block.copies:
            return
        filling = "filling" in block.copies.values()
        allowed = cause not in BY_CHOICE or not (self.children(name) or block.pins or filling)
        try:
            taken = self.residency.remove(self.row(name), cause, 1)
        except RuntimeError:
            assert not allowed
            return
        assert allowed
        assert sorted(copy.tier for copy in taken) == sorted(block.copies)
        block.copies.clear()
        block.facts.clear()
        block.keep_what_copies_say()
        block.pins = 0
        self.prune()
        self.gone = [(other, why) for other, why in self.gone if other != name] + [(name, cause)]
        assert not self.residency.is_current(self.tokens.pop(name))

    @rule(tenant=tenants, number=numbers, on=st.booleans())
    def pin(self, tenant: int, number: int, on: bool) -> None:
        block = self.blocks.get((tenant, number))
        if block is None or not block.readable():
            return
        if on:
            self.residency.pin(self.row((tenant, number)))
            block.pins += 1
        elif block.pins:
            self.residency.unpin(self.row((tenant, number)))
            block.pins -= 1

    @rule(tenant=tenants, number=numbers, column=st.sampled_from(OF_BLOCKS), value=st.integers(0, 100))
    def note_of_block(self, tenant: int, number: int, column: Column, value: int) -> None:
        block = self.blocks.get((tenant, number), Block())
        if block.readable():
            self.residency.rows.optional.set(column.name, self.row((tenant, number)), value)
            block.facts[column.name] = value

    @rule(tenant=tenants, number=numbers, tier=tiers, column=st.sampled_from(OF_COPIES), value=st.integers(0, 100))
    def note_of_copy(self, tenant: int, number: int, tier: int, column: Column, value: int) -> None:
        block = self.blocks.get((tenant, number), Block())
        if tier in block.copies:
            self.residency.copies[tier].optional.set(column.name, self.row((tenant, number)), value)
            block.of_copies[tier, column.name] = value

    # What must hold

    @invariant()
    def books_balance(self) -> None:
        assert check(self.residency) == []
        assert self.residency.rows.live == len(self.blocks), "rows leak or are lost"
        assert len(self.residency) == sum(block.readable() for block in self.blocks.values())
        for tier in range(len(TIERS)):
            for tenant in (0, 1):
                copies = sum(tier in block.copies for (of, _), block in self.blocks.items() if of == tenant)
                assert self.residency.tenant_bytes(tenant, tier) == copies * BLOCK_BYTES

    @invariant()
    def rows_say_what_the_model_says(self) -> None:
        for name, block in self.blocks.items():
            row = self.row(name)
            assert self.residency.key(row) == key(name[1])
            assert self.residency.tenant_of(row) == name[0]
            assert (self.residency.find(name[0], key(name[1])) == row) is block.readable()
            assert {t: self.residency.state(row, t).name.lower() for t in block.copies} == block.copies
            assert self.residency.children(row) == len(self.children(name))
            assert self.residency.pin_count(row) == block.pins
            for column in OF_BLOCKS:
                assert self.residency.rows.optional.get(column.name, row) == block.facts.get(column.name, 0)
            for tier in range(len(TIERS)):
                for column in OF_COPIES:
                    held = self.residency.copies[tier].optional.get(column.name, row)
                    assert held == block.of_copies.get((tier, column.name), 0)
            if block.copies:
                assert self.residency.current(self.tokens[name]) == row

    @invariant()
    def runs_end_where_the_model_ends(self) -> None:
        run = self.residency.find_run(0, pack(*range(BLOCKS)))
        leading = 0
        while leading < BLOCKS and (0, leading) in self.blocks and self.blocks[0, leading].readable():
            leading += 1
        assert run == [self.row((0, number)) for number in range(leading)]

    @precondition(lambda self: self.gone)
    @invariant()
    def why_missing_is_known_of_the_last_few(self) -> None:
        for tenant in (0, 1):
            recent = [(number, cause) for (of, number), cause in self.gone if of == tenant][-4:]
            for number, cause in recent:
                block = self.blocks.get((tenant, number))
                if block is None or not block.readable():  # what is stored again, and expires, is said to
                    assert self.residency.why_missing(tenant, key(number)).cause is cause


ResidencyAgainstModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestResidency = ResidencyAgainstModel.TestCase
