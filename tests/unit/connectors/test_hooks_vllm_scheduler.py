"""The scheduler's half: hits, orders, and the bookkeeping between admission and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_connectors.vllm.answers import EndedAnswer
from kvstore_connectors.vllm.identity import Extras
from kvstore_connectors.vllm.model import describe_extras
from kvstore_connectors.vllm.orders import RequestPrefix
from kvstore_connectors.vllm.scheduler import LoadRules, SchedulerSide
from kvstore_proto.identity import pack_tokens
from tests.reference.vllm_records import BLOCK_TOKENS, KeyedStore, Step, plain_groups, request

TOKENS = list(range(1, 23))  # five whole blocks of four and a tail of two
TABLE = [10, 11, 12, 13, 14, 15, 16, 17]


def store_with(tokens: list[int], blocks: int) -> KeyedStore:
    store = KeyedStore()
    keys = store.keys(np.array(tokens))
    assert keys is not None
    store.blocks = {key: np.zeros(8, np.uint8) for key in list(keys)[:blocks]}
    return store


def side_of(*stores: KeyedStore, **changed: Any) -> SchedulerSide:
    settings: dict[str, Any] = {
        "groups": plain_groups(),
        "loads": True,
        "saves": True,
        "lookup_deadline_s": 0.05,
        "rules": LoadRules(None, block_bytes=8),
    }
    return SchedulerSide(stores, lambda asked: describe_extras(asked, hashed_items=True), **(settings | changed))


def step(**fields: Any) -> Any:
    return Step(tables={"r": TABLE}, **fields).output()


def test_a_hit_is_loaded_and_what_the_step_fills_is_stored() -> None:
    side, asked = side_of(store_with(TOKENS, 3)), request("r", TOKENS)
    assert side.matched_tokens(asked, 0) == (12, False)
    side.admitted(asked, 12, [TABLE])
    orders = side.orders(step(new={"r": (12, 10)}))
    (load,), (save,) = orders.loads, orders.saves
    assert (load.first_block, load.block_ids) == (0, (10, 11, 12))
    assert load.prefix.tokens == pack_tokens(TOKENS[:12])
    assert (save.first_block, save.block_ids) == (3, (10, 11, 12, 13, 14))
    assert save.prefix.tokens == pack_tokens(TOKENS[:20])


def test_behind_the_local_cache_only_the_rest_is_loaded() -> None:
    side, asked = side_of(store_with(TOKENS, 4)), request("r", TOKENS)
    assert side.matched_tokens(asked, 8) == (8, False)
    side.admitted(asked, 8, [TABLE])
    (load,) = side.orders(step(new={"r": (16, 6)})).loads
    assert (load.first_block, load.block_ids) == (2, (12, 13))


def test_a_local_cache_that_has_more_than_the_store_is_not_cut() -> None:
    side, asked = side_of(store_with(TOKENS, 2)), request("r", TOKENS)
    assert side.matched_tokens(asked, 16) == (0, False)
    side.admitted(asked, 0, [TABLE])
    orders = side.orders(step(new={"r": (16, 6)}))
    assert not orders.loads
    assert orders.saves[0].first_block == 2  # the store gets what it lacks


def test_a_whole_prompt_is_never_taken() -> None:
    exact = TOKENS[:20]
    assert side_of(store_with(exact, 5)).matched_tokens(request("r", exact), 0) == (16, False)


def test_chunked_prefill_and_decoding_store_each_block_once() -> None:
    side, asked = side_of(KeyedStore()), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    ordered = list(side.orders(step(new={"r": (0, 6)})).saves)
    computed = 6
    for scheduled in (6, 6, 4, 1, 1, 1, 1):
        if computed >= len(TOKENS):
            asked.all_token_ids.append(99)
        ordered += side.orders(step(running={"r": (computed, scheduled)})).saves
        computed += scheduled
    ranges = [(save.first_block, len(save.block_ids)) for save in ordered]
    assert ranges == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert ordered[-1].prefix.tokens == pack_tokens([*TOKENS, 99, 99])


def test_guessed_tokens_do_not_fill_a_block() -> None:
    side, asked = side_of(KeyedStore()), request("r", TOKENS[:14])
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 14)}))
    asked.all_token_ids.append(7)
    assert not side.orders(step(running={"r": (14, 4)}, guessed={"r": [1, 2, 3]})).saves


def test_tokens_that_are_not_known_yet_do_not_fill_a_block() -> None:
    """Asynchronous scheduling runs ahead of the sampled tokens."""
    side, asked = side_of(KeyedStore()), request("r", TOKENS[:15])
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 15)}))
    assert not side.orders(step(running={"r": (15, 1)})).saves
    asked.all_token_ids.append(7)
    assert len(side.orders(step(running={"r": (16, 1)})).saves) == 1


def test_what_was_computed_on_a_failed_load_is_ordered_again() -> None:
    side, asked = side_of(store_with(TOKENS, 3)), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 12, [TABLE])
    assert side.orders(step(new={"r": (12, 10)})).saves[0].first_block == 3
    again = side.orders(step(running={"r": (4, 18)}))  # vLLM took all but the first block back
    assert not again.loads
    assert (again.saves[0].first_block, len(again.saves[0].block_ids)) == (1, 5)


def test_a_finished_request_is_named_once() -> None:
    side, asked = side_of(KeyedStore()), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 22)}))
    side.finished(asked)
    assert side.orders(step()).ended == ("r",)
    assert side.orders(step()).ended == ()


def test_the_end_of_an_answer_is_reported_with_all_blocks_that_were_ordered() -> None:
    reported: list[EndedAnswer] = []
    side, asked = side_of(KeyedStore(), on_answer=reported.append), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 22)}))
    asked.all_token_ids += [7, 8]
    side.orders(step(running={"r": (22, 1)}))
    side.orders(step(running={"r": (23, 1)}))
    asked.num_output_tokens = 3
    side.finished(asked)
    assert reported == [EndedAnswer(RequestPrefix(pack_tokens([*TOKENS, 7, 8])), 6, 3)]


def test_an_answer_carries_the_hints_that_its_request_came_with() -> None:
    reported: list[EndedAnswer] = []
    hints = SimpleNamespace(actions=[])
    side = side_of(KeyedStore(), on_answer=reported.append)
    asked = request("r", TOKENS, kv_hints=hints, num_output_tokens=1)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 22)}))
    side.finished(asked)
    assert [answer.kv_hints for answer in reported] == [hints]


def test_without_a_whole_answer_or_a_whole_block_or_after_the_end_nothing_is_reported() -> None:
    reported: list[EndedAnswer] = []
    side = side_of(KeyedStore(), on_answer=reported.append)
    early, short = request("e", TOKENS), request("s", TOKENS[:3], num_output_tokens=1)
    aborted = request("a", TOKENS, num_output_tokens=3, status=SimpleNamespace(name="FINISHED_ABORTED"))
    stopped = request("o", TOKENS, num_output_tokens=3)
    for asked, scheduled in ((early, 22), (short, 3), (aborted, 22), (stopped, 22)):
        side.matched_tokens(asked, 0)
        side.admitted(asked, 0, [TABLE])
        name = asked.request_id
        side.orders(Step(tables={name: TABLE}, new={name: (0, scheduled)}).output())
        if asked is stopped:
            side.stop()
        side.finished(asked)
    assert reported == []


def test_a_request_that_ends_unseen_is_no_matter() -> None:
    side = side_of(KeyedStore())
    side.finished(request("unknown", TOKENS))
    assert side.orders(step()).ended == ()


def test_a_preempted_request_is_named_and_loads_again_when_it_resumes() -> None:
    store = KeyedStore()
    side, asked = side_of(store), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 22)}))
    asked.num_preemptions = 1
    assert side.orders(step()).ended == ("r",)
    store.blocks = store_with(TOKENS, 5).blocks
    assert side.matched_tokens(asked, 0) == (20, False)
    side.admitted(asked, 20, [TABLE])
    orders = side.orders(Step(running={"r": (20, 2)}, tables={"r": [30, 31, 32, 33, 34, 35]}).output())
    assert orders.loads[0].block_ids == (30, 31, 32, 33, 34)
    assert not orders.saves and not orders.ended


def test_preempted_and_resumed_in_one_step() -> None:
    side, asked = side_of(KeyedStore()), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    side.orders(step(new={"r": (0, 22)}))
    asked.num_preemptions = 1
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    orders = side.orders(Step(running={"r": (0, 8)}, tables={"r": [40, 41]}).output())
    assert orders.ended == ("r",)
    assert orders.saves[0].block_ids == (40, 41)


def test_every_rank_must_have_a_block() -> None:
    assert side_of(store_with(TOKENS, 5), store_with(TOKENS, 2)).matched_tokens(request("r", TOKENS), 0) == (8, False)


def test_without_sessions_or_daemon_nothing_matches() -> None:
    assert side_of().matched_tokens(request("r", TOKENS), 0) == (0, False)
    store = store_with(TOKENS, 5)
    store.connected = False
    assert side_of(store).matched_tokens(request("r", TOKENS), 0) == (0, False)


def test_what_cannot_be_named_is_neither_asked_for_nor_stored() -> None:
    store = store_with(TOKENS, 5)
    side, asked = side_of(store), request("r", TOKENS, prompt_embeds=object())
    assert side.matched_tokens(asked, 0) == (0, False)
    side.admitted(asked, 0, [TABLE])
    orders = side.orders(step(new={"r": (0, 22)}))
    assert (orders.loads, orders.saves, store.lookups) == ((), (), 0)


def test_a_request_that_must_compute_its_prompt_is_stored_but_not_loaded() -> None:
    store = store_with(TOKENS, 5)
    side, asked = side_of(store), request("r", TOKENS, skip_reading_prefix_cache=True)
    assert side.matched_tokens(asked, 0) == (0, False)
    side.admitted(asked, 0, [TABLE])
    assert len(side.orders(step(new={"r": (0, 22)})).saves) == 1


def test_roles() -> None:
    store = store_with(TOKENS, 5)
    assert side_of(store, loads=False).matched_tokens(request("r", TOKENS), 0) == (0, False)
    side, asked = side_of(store, saves=False), request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 0, [TABLE])
    assert not side.orders(step(new={"r": (0, 22)})).saves


def test_a_salted_request_finds_only_what_was_salted_alike() -> None:
    store = store_with(TOKENS, 5)
    salted = request("r", TOKENS, cache_salt="one")
    side = side_of(store)
    assert side.matched_tokens(salted, 0) == (0, False)
    side.admitted(salted, 0, [TABLE])
    (save,) = side.orders(step(new={"r": (0, 22)})).saves
    assert save.prefix.digests == Extras(salt="one").digests(5, BLOCK_TOKENS)


def test_tiers_of_a_load_are_reported() -> None:
    store = store_with(TOKENS, 3)
    store.tier = "nvme"
    side, asked = side_of(store), request("r", TOKENS)
    side.matched_tokens(asked, 4)
    assert side.tiers("r", 2) == ("nvme", "nvme")
    assert side.tiers("unknown", 2) == ()


def test_after_a_stop_nothing_is_loaded_or_stored() -> None:
    side, asked = side_of(store_with(TOKENS, 3)), request("r", TOKENS)
    side.stop()
    assert side.matched_tokens(asked, 0) == (0, False)
    side.admitted(asked, 0, [TABLE])
    assert not side.orders(step(new={"r": (0, 22)})).saves


def test_a_step_says_how_many_requests_continue_their_answers() -> None:
    side = side_of(store_with(TOKENS, 0))
    for name in ("r", "unnamed"):
        side.matched_tokens(request(name, TOKENS, prompt_embeds=None if name == "r" else object()), 0)
    tables = {"r": TABLE, "unnamed": TABLE}
    assert side.orders(Step(new={"r": (0, 12), "unnamed": (0, 22)}, tables=tables).output()).decodes == 0
    assert side.orders(Step(running={"r": (12, 10), "unnamed": (22, 1)}, tables=tables).output()).decodes == 1
    assert side.orders(Step(running={"r": (22, 1), "unnamed": (23, 1)}, tables=tables).output()).decodes == 2
    assert side.orders(Step(running={}, tables=tables).output()).decodes == 0
    answered = request("r", [*TOKENS, 7, 8], num_output_tokens=2, num_preemptions=1)
    side.matched_tokens(answered, 0)
    assert side.orders(Step(running={"r": (0, 20)}, tables=tables).output()).decodes == 0, "its prompt is computed anew"
    assert side.orders(Step(running={"r": (22, 2)}, tables=tables).output()).decodes == 1
