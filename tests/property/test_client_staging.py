"""The loan as a state machine: bytes are never handed out twice, and all of them come back, each once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvstore_client.staging import ClientStaging, Extent, Use
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.examples import examples

PAGE = 4096
PAGES = 24


class Daemon:
    """Answers Lend at once, or not at all."""

    def __init__(self) -> None:
        self.number = 0
        self.is_silent = False
        self.late: Any = None

    def __call__(self, request: wire.Request, _timeout_s: float, late: Any) -> wire.Response | str:
        assert request.HasField("lend")
        self.number += 1
        response = wire.Response(lend=wire.LendReply(loan=self.number))
        if self.is_silent:
            self.late = lambda: late(response)
            return "deadline"
        return response


class LoanMachine(RuleBasedStateMachine):
    """`open` are requests that were not answered or given up; `silent` requests that no caller waits for any more."""

    open_uses = Bundle("open_uses")
    silent_uses = Bundle("silent_uses")

    def __init__(self) -> None:
        super().__init__()
        self.daemon: Any = Daemon()
        self.staging = ClientStaging(np.empty(PAGES * PAGE, np.uint8))
        assert self.staging.obtain(self.daemon, 1.0) == ""
        self.used: dict[Use, list[Extent]] = {}  # what the daemon may be reading
        self.renewing: list[Use] = []  # those that a renewal under way will free
        self.unanswered: set[Use] = set()

    @rule(target=open_uses, slots=st.integers(1, 8), pages=st.integers(1, 4), shares=st.integers(0, 2))
    def send(self, slots: int, pages: int, shares: int) -> Any:
        use = Use()
        for _ in range(1 + shares):
            extent = self.staging.take(pages * PAGE, slots)
            if extent is None:
                break
            assert extent.offset >= 0 and extent.offset + extent.nbytes <= PAGES * PAGE
            for others in self.used.values():
                for other in others:
                    assert extent.offset + extent.nbytes <= other.offset or other.offset + other.nbytes <= extent.offset
            use.extents += [extent] * extent.users
            self.used.setdefault(use, []).append(extent)
        return use if use in self.used else multiple()

    @rule(use=consumes(open_uses), again=st.booleans(), target=open_uses)
    def answer(self, use: Use, again: bool) -> Any:
        """Answered; with `again` some of its blocks go into another request, in place."""
        following = multiple()
        kept: list[Extent] = []
        if again:
            following = Use()
            for extent in use.extents[::2]:
                self.staging.hold(extent)
                following.extents.append(extent)
            kept = [extent for extent in self.used[use] if extent in following.extents]
        self.staging.end(use)
        self.staging.end(use)
        del self.used[use]
        if again:
            self.used[following] = kept
        return following

    @rule(use=consumes(open_uses), target=silent_uses)
    def stop_waiting(self, use: Use) -> tuple[Use, Any]:
        self.unanswered.add(use)
        return use, self.staging.leave_unanswered(use)

    @rule(silent=silent_uses)
    def answer_late(self, silent: tuple[Use, Any]) -> None:
        """Perhaps for the second time, or after the loan was renewed."""
        use, late = silent
        late(wire.Response())
        self.used.pop(use, None)
        self.unanswered.discard(use)

    @rule()
    @precondition(lambda self: self.daemon.late is None)
    def renew(self) -> None:
        self.staging.renew(self.daemon, 1.0)
        for use in self.unanswered:
            self.used.pop(use)
        self.unanswered.clear()
        assert self.staging.loan <= self.daemon.number

    @rule()
    @precondition(lambda self: self.daemon.late is None and self.unanswered)
    def renew_without_an_answer(self) -> None:
        self.daemon.is_silent = True
        self.staging.renew(self.daemon, 1.0)
        self.daemon.is_silent = False
        self.renewing = list(self.unanswered)

    @rule()
    @precondition(lambda self: self.daemon.late is not None)
    def the_renewal_is_answered_late(self) -> None:
        self.daemon.late()
        self.daemon.late = None
        for use in self.renewing:
            self.used.pop(use, None)
            self.unanswered.discard(use)

    @invariant()
    def exact(self) -> None:
        extents = {id(extent): extent for held in self.used.values() for extent in held}
        assert self.staging.used_bytes() == sum(extent.nbytes for extent in extents.values())

    def teardown(self) -> None:
        for use in list(self.used):
            self.staging.end(use)
        assert self.staging.used_bytes() == 0
        whole = self.staging.take(PAGES * PAGE, 1)
        assert whole is not None and whole.offset == 0, "given back, it is one extent again"


LoanMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestLoan = LoanMachine.TestCase
