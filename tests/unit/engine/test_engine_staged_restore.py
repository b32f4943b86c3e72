"""Stages restore a prefix each for itself: right whatever is missing, and none waits for another without need."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.weights import Model, load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.stages.pipeline import Pipeline, open_pipeline, stage_layers
from kvstore_engine.stages.restoration import StageSide
from kvstore_engine.stages.restorer import StagedRestoration, StagedRestorer
from kvstore_engine.stages.stores import StageLookup, StageStore, look_up, stage_fingerprints, store_prefix
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_restore.learned import LearnedCosts
from kvstore_restore.stages import Stages
from tests.reference.assumed_costs import assume
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.memory_session import MemorySession, MemoryStream
from tests.reference.prefill import prefill
from tests.reference.skips import skip_without_ggml

_SHAPE = TinyModel(layers=4, width=64, heads=4, kv_heads=2, head_dim=32, feed_forward=96, quantisation="q8_0")
_CHUNKS = 6
_TOKENS = np.random.default_rng(5).integers(0, _SHAPE.vocabulary, 64 * _CHUNKS + 30).astype(np.int32)
_TABLE = np.random.default_rng(6).permutation(40).astype(np.int32)
_SIZES = StepSizes(threads=1, max_tokens_per_step=128, max_sequences=1, max_context=512)
_EVERY = frozenset(range(_CHUNKS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    skip_without_ggml()
    with load_model(GGUFFile.open(write_model(tmp_path_factory.mktemp("model") / "m.gguf", _SHAPE))) as model:
        yield model


@pytest.fixture(scope="module")
def wanted(model: Model) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Logits and planes of one executor."""
    pool = BlockPool(model.config, 40)
    pool.planes.fill(0)
    with Executor(model, pool, _SIZES) as executor:
        return prefill(executor, _TOKENS, 0, _TABLE), pool.planes


def _sessions(model: Model, stages: int) -> list[StageStore]:
    pool = BlockPool(model.config, 1)
    return [
        StageStore(
            MemorySession(pool.of_layers(layers).payload_bytes(4), mapped_blocks=0),
            MemorySession(64 * _SHAPE.width * 4, mapped_blocks=0) if layers.start else None,
        )
        for layers in stage_layers(_SHAPE.layers, stages)
    ]


def _prefilled(
    pipeline: Pipeline, stores: Sequence[StageStore], **options: Any
) -> tuple[npt.NDArray[np.float32], StagedRestoration]:
    pipeline.pool.planes.fill(0)
    with StagedRestorer(pipeline, stores, **options) as restorer:
        return restorer.prefill(_TOKENS, _TABLE, keeps_inputs=True)


class Stored:
    """A prefix that a pipeline has computed and stored; `again` restores it."""

    def __init__(self, model: Model, wanted: Any, stages: int, stack: ExitStack) -> None:
        self.wanted = wanted
        self.pipeline = stack.enter_context(open_pipeline(model, BlockPool(model.config, 40), stages, _SIZES))
        self.stores = _sessions(model, stages)
        logits, self.cold = _prefilled(self.pipeline, self.stores)
        self.check(logits)
        self.statuses = store_prefix(self.pipeline, self.stores, _TOKENS, _TABLE, self.cold.inputs)

    def again(self, **options: Any) -> StagedRestoration:
        logits, restored = _prefilled(self.pipeline, self.stores, **{"loads_all": True, **options})
        self.check(logits)
        return restored

    def check(self, logits: npt.NDArray[np.float32]) -> None:
        np.testing.assert_array_equal(logits, self.wanted[0])
        np.testing.assert_array_equal(self.pipeline.pool.planes, self.wanted[1])

    def kv(self, stage: int) -> MemorySession:
        session = self.stores[stage].kv
        assert isinstance(session, MemorySession)
        return session

    def inputs(self, stage: int) -> MemorySession:
        session = self.stores[stage].inputs
        assert isinstance(session, MemorySession)
        return session


@pytest.fixture(params=[1, 2, 4])
def stored(model: Model, wanted: Any, request: pytest.FixtureRequest) -> Iterator[Stored]:
    with ExitStack() as stack:
        yield Stored(model, wanted, request.param, stack)


@pytest.fixture
def two(model: Model, wanted: Any) -> Iterator[Stored]:
    with ExitStack() as stack:
        yield Stored(model, wanted, 2, stack)


def test_what_was_stored_by_stages_is_loaded_by_stages(stored: Stored) -> None:
    assert all(record.computed == _CHUNKS and not record.stored for record in stored.cold.stages)
    for number, statuses in enumerate(stored.statuses):
        assert statuses.kv == ("stored",) * _CHUNKS and not statuses.failure
        assert statuses.inputs == (("stored",) * _CHUNKS if number else ())
    warm = stored.again()
    assert [(each.plan, each.loaded, each.computed) for each in warm.stages] == [("load", _CHUNKS, 0)] * len(
        stored.stores
    )
    assert all(lease.released for each in stored.stores for lease in each.kv.leases)  # type: ignore[union-attr]


def test_the_front_is_computed_from_stored_states_while_the_back_is_loaded(stored: Stored) -> None:
    for stage in range(len(stored.stores)):
        stored.kv(stage).vanishing = frozenset({0, 1, 2})
    records = stored.again().stages
    assert [(each.loaded, each.computed, each.lost, each.forwarded) for each in records] == [(3, 3, 3, 0)] * len(
        records
    )
    assert all(3 <= each.inputs <= _CHUNKS for each in records[1:])


def test_states_that_vanish_are_computed_again_by_the_stage_before(two: Stored) -> None:
    """The second stage has nothing, and states for chunk 0 alone; the first has loaded all."""
    two.kv(1).vanishing, two.inputs(1).vanishing = _EVERY, _EVERY - {0}
    first, second = two.again().stages
    assert (first.loaded, first.computed) == (_CHUNKS, 0)
    assert (second.loaded, second.computed) == (0, _CHUNKS)
    assert first.forwarded + second.inputs == _CHUNKS and second.inputs <= 1


@pytest.mark.parametrize("what", ["leases end", "stores fail", "no stores"])
def test_a_store_that_fails_costs_computing_alone(two: Stored, what: str) -> None:
    for stage in range(2):
        for session in (two.kv(stage), *([two.inputs(stage)] if stage else [])):
            session.leases_stay_valid = what != "leases end"
            session.fail_with = ConnectionResetError("gone") if what == "stores fail" else None
            session.state = "degraded" if what == "no stores" else "connected"
    records = two.again().stages
    assert [(each.loaded, each.computed, each.inputs) for each in records] == [(0, _CHUNKS, 0)] * 2
    assert {each.failure for each in store_prefix(two.pipeline, two.stores, _TOKENS, _TABLE)} == (
        {"storing failed: ConnectionResetError: gone"} if what == "stores fail" else {""}
    )


def test_payloads_of_another_size_cost_computing_alone(two: Stored) -> None:
    """The payloads are of a stage that another version of the engine stored under the same name."""
    for session in (two.kv(1), two.inputs(1)):
        session.blocks = {key: payload[:-4] for key, payload in session.blocks.items()}
    first, second = two.again().stages
    assert (first.loaded, second.loaded, second.computed, second.inputs) == (_CHUNKS, 0, _CHUNKS, 0)
    assert first.forwarded == second.lost == _CHUNKS
    assert all(lease.released for session in (two.kv(1), two.inputs(1)) for lease in session.leases)


def test_each_stage_plans_by_its_own_costs(two: Stored) -> None:
    """Computing looks slow to the first stage and loading to the second. The clock stands: no load stalls."""
    costs = [LearnedCosts(), LearnedCosts()]
    assume(costs[0])
    assume(costs[1], [1e-6, 1e-6, 0.0])
    for each in costs:
        each.expect_load("nvme", two.kv(0).block_bytes, 0.1)
    first, second = two.again(costs=costs, loads_all=False, clock=lambda: 0.0).stages
    assert (first.plan, first.loaded, second.plan, second.computed) == ("load", _CHUNKS, "compute", _CHUNKS)
    assert first.forwarded == 0 and second.inputs == _CHUNKS
    two.inputs(1).blocks.clear()
    assume(costs[1], [1e-6, 1e-6, 0.0])
    _, second = two.again(costs=costs, loads_all=False, clock=lambda: 0.0).stages
    assert (second.plan, second.loaded) == ("load", _CHUNKS)  # computing would want the first stage to compute


def _side(found: StageLookup, costs: LearnedCosts, number: int = 0) -> StageSide:
    return StageSide(
        chunk_tokens=64, chunk_bytes=1000, learned=costs, number=number, layers=range(number, number + 1), found=found,
        input_bytes=100,
    )  # fmt: skip


def test_a_stage_leaves_to_its_link_what_it_could_only_compute_if_the_one_before_did_again() -> None:
    costs = LearnedCosts()
    assume(costs, [0.0, 1.0, 0.0])
    costs.expect_load("nvme", 1000, 0.125)  # a chunk takes as long either way

    def side(number: int) -> StageSide:
        found = StageLookup(("nvme",) * _CHUNKS, ("absent",) * _CHUNKS)
        made = _side(found, costs, number)
        made.make_plan(None if number == 0 else first)
        return made

    first = side(0)
    second = side(1)
    assert first.plan is not None and second.plan is not None and first.plan.axis == second.plan.axis == "tokens"
    first.stages = second.stages = stages = Stages([first.pointers, second.pointers], [[False] * _CHUNKS])
    assert second.pointers.computable(1) == range(1)  # it waits for the first stage
    assert stages.next_compute(0) == 0 and stages.computed(0, 0) and stages.next_compute(1) == 0
    for chunk in (1, 2):
        first.pointers.loaded_chunk(chunk)
    stages.computed(1, 0)
    assert not second.pointers.computable(1)
    second.pointers.lose_all()
    assert stages.wanted(0) == 3 and second.pointers.computable(1) == range(1, 2)


def test_a_chunk_that_is_being_computed_when_the_loads_end_is_not_lost() -> None:
    costs = LearnedCosts()
    assume(costs, [0.0, 1.0, 0.0])
    costs.expect_load("nvme", 1000, 0.125)
    side = _side(StageLookup(("nvme",) * _CHUNKS, ()), costs)
    side.make_plan(None)
    side.stages = Stages([side.pointers], [])
    assert side.stages.next_compute(0) == 0
    side.pointers.loaded_chunk(_CHUNKS - 1)
    side.lose_kv()
    assert side.lost == _CHUNKS - 2


class _Watched(Executor):
    """`begun` counts steps; each waits for `may_go`, if there is one."""

    def __init__(self, *args: Any, may_go: threading.Event | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun, self._may_go = threading.Semaphore(0), may_go

    def forward(self, slices: Any, out: Any = None, *, hidden: Any = None) -> Any:
        assert self._may_go is None or self._may_go.wait(timeout=60)
        result = super().forward(slices, out, hidden=hidden)
        self.begun.release()
        return result


def test_a_stage_with_stored_states_does_not_wait_for_the_one_before(model: Model, two: Stored) -> None:
    pool, may_go = BlockPool(model.config, 40), threading.Event()
    first, second = (
        _Watched(model, pool.of_layers(layers), _SIZES, layers=layers, may_go=None if layers.start else may_go)
        for layers in stage_layers(_SHAPE.layers, 2)
    )
    for stage in range(2):
        two.kv(stage).vanishing = _EVERY
    with Pipeline([first, second], pool) as pipeline, ThreadPoolExecutor(1) as caller:
        under_way = caller.submit(_prefilled, pipeline, two.stores, loads_all=True)
        for _ in range(_CHUNKS):
            assert second.begun.acquire(timeout=60)
        assert not first.begun.acquire(blocking=False)
        may_go.set()
        logits, restored = under_way.result(timeout=60)
    np.testing.assert_array_equal(logits, two.wanted[0])
    np.testing.assert_array_equal(pool.planes, two.wanted[1])
    assert [each.computed for each in restored.stages] == [_CHUNKS] * 2


class _GatedStream(MemoryStream):
    """A session's stream that begins once `gate` has passed; `closed` is set when no more is wanted of it."""

    def __init__(self, session: MemorySession, *, gate: Callable[[], bool], closed: threading.Event) -> None:
        resident = range(0 if session.vanishing else _CHUNKS)
        super().__init__(session, _TOKENS, ("nvme",) * _CHUNKS, [range(at, at + 1) for at in resident])
        self._gate, self._closed = gate, closed

    def __iter__(self) -> Iterator[Any]:
        assert self._gate()
        return super().__iter__()

    def close(self) -> None:
        super().close()
        self._closed.set()


def _limited_clock(readings: int) -> Callable[[], float]:
    """Raises once a restoration looks at it more often: it would go on for ever."""
    left = iter(range(readings))

    def now() -> float:
        assert next(left, None) is not None, "the restoration does not end"
        return time.perf_counter()

    return now


def test_states_that_a_stage_has_used_are_computed_again_where_a_later_stage_lacks_them(
    model: Model, wanted: Any
) -> None:
    """The second stage computes from stored states, while the third has loaded all; then the fourth loads nothing, and
    neither its states nor the third one's are stored."""
    third_is_whole, inputs_are_over = threading.Event(), threading.Event()
    with ExitStack() as stack:
        four = Stored(model, wanted, 4, stack)
        for stage in (2, 3):
            four.inputs(stage).blocks.clear()
        for stage in (1, 3):
            four.kv(stage).vanishing = _EVERY
        pool = BlockPool(model.config, 40)
        executors = [
            _Watched(model, pool.of_layers(layers), _SIZES, layers=layers, may_go=inputs_are_over if at == 1 else None)
            for at, layers in enumerate(stage_layers(_SHAPE.layers, 4))
        ]

        def all_but_one_taken() -> bool:
            return all(executors[1].begun.acquire(timeout=60) for _ in range(_CHUNKS))

        def serve(session: MemorySession, gate: Callable[[], bool], closed: threading.Event) -> None:
            stream = _GatedStream(session, gate=gate, closed=closed)
            session.get_stream = lambda *args, **options: stream  # type: ignore[method-assign]

        serve(four.kv(2), lambda: True, third_is_whole)
        serve(four.inputs(1), lambda: third_is_whole.wait(timeout=60), inputs_are_over)
        serve(four.kv(3), all_but_one_taken, threading.Event())
        with Pipeline(executors, pool) as pipeline:
            logits, restored = _prefilled(pipeline, four.stores, loads_all=True, clock=_limited_clock(1500))
    np.testing.assert_array_equal(logits, wanted[0])
    np.testing.assert_array_equal(pool.planes, wanted[1])
    assert [each.loaded for each in restored.stages] == [_CHUNKS, 0, _CHUNKS, 0]
    assert restored.stages[1].inputs == restored.stages[3].computed == _CHUNKS
    assert [each.forwarded for each in restored.stages] == [_CHUNKS, _CHUNKS, _CHUNKS, 0]


class _Broken(Executor):
    def forward(self, slices: Any, out: Any = None, *, hidden: Any = None) -> Any:
        raise RuntimeError("out of order")


class _OpenStream(MemoryStream):
    """Brings nothing until it is closed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opened, self.closed = threading.Event(), threading.Event()
        self.was_given_up = False

    def __iter__(self) -> Iterator[Any]:
        self.opened.set()
        self.was_given_up = self.closed.wait(timeout=20)
        return iter(())

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_a_stage_that_cannot_compute_ends_the_restoration_and_its_streams(two: Stored) -> None:
    """The second stage has nothing to load and fails; the first one's stream is open."""
    session, parts = two.kv(0), stage_layers(_SHAPE.layers, 2)
    stream = _OpenStream(session, _TOKENS, ("nvme",) * _CHUNKS, [])
    session.get_stream = lambda *args, **options: stream  # type: ignore[method-assign]
    pool = BlockPool(two.pipeline.config, 40)
    executors = [
        kind(two.pipeline.stages[0].executor.model, pool.of_layers(part), _SIZES, layers=part)
        for kind, part in zip((Executor, _Broken), parts, strict=True)
    ]
    two.kv(1).blocks.clear()
    with Pipeline(executors, pool) as pipeline, pytest.raises(RuntimeError, match="out of order"):
        _prefilled(pipeline, two.stores, loads_all=True)
    assert stream.closed.is_set() or not stream.opened.is_set()
    assert all(lease.released for lease in two.inputs(1).leases)


def test_streams_that_stall_are_overtaken(two: Stored) -> None:
    streams = []
    for stage in range(2):
        session = two.kv(stage)
        stream = _OpenStream(session, _TOKENS, ("nvme",) * _CHUNKS, [])
        session.get_stream = lambda *args, stream=stream, **options: stream  # type: ignore[method-assign, misc]
        streams.append(stream)
    records = two.again().stages
    assert [(each.plan, each.loaded, each.computed) for each in records] == [("load", 0, _CHUNKS)] * 2
    assert all(stream.was_given_up for stream in streams)


def test_a_prompt_without_a_whole_block_is_computed(two: Stored) -> None:
    with StagedRestorer(two.pipeline, two.stores) as restorer:
        logits, restored = restorer.prefill(_TOKENS[:64], _TABLE)
    assert np.isfinite(logits).all() and [each.chunks for each in restored.stages] == [0, 0]
    with pytest.raises(ValueError, match="2 stages need"):
        StagedRestorer(two.pipeline, two.stores[:1])


def test_stages_have_fingerprints_of_their_own_and_boundaries_those_of_their_layer() -> None:
    group = LayerGroup(0, layers=tuple(range(8)), bytes_per_token_per_layer=256)
    whole = Fingerprint("m", "w", groups=(group,))
    two, four = (stage_fingerprints(whole, stage_layers(8, count), 64) for count in (2, 4))
    kv = [each for each, _ in (*two, *four)]
    assert len({each.digest() for each in (whole, *kv)}) == 7
    assert [each.payload_bytes() for each, _ in two] == [whole.payload_bytes() // 2] * 2
    assert [(each.shard_index, each.shard_count) for each, _ in four] == [(at, 4) for at in range(4)]
    assert two[0][1] is None and four[0][1] is None
    assert two[1][1] == four[2][1] != four[1][1]
    assert two[1][1] is not None and two[1][1].payload_bytes() == 64 * 64 * 4
    assert stage_fingerprints(Fingerprint("m", "w", kv_dtype="q8_0", groups=(group,)), [range(4), range(4, 8)], 64)[1][
        1
    ] not in (two[1][1], None)


def test_before_the_first_load_from_a_tier_the_daemon_is_believed() -> None:
    costs = LearnedCosts()
    assume(costs, [0.0, 1.0, 0.0])
    prefix, session = _TOKENS[: 64 * _CHUNKS], MemorySession(1000, mapped_blocks=0, estimated_load_s=5.0 * _CHUNKS)
    session.put(prefix, first_block=0, payloads=[lambda dest: dest.fill(0)] * _CHUNKS)
    found = look_up(StageStore(session), prefix)
    assert found == StageLookup(("nvme",) * _CHUNKS, ("absent",) * _CHUNKS, {"nvme": 5.0})
    believed = replace(found, load_s={**found.load_s, "host": 1e-6})
    side = _side(believed, costs)
    side.make_plan(None)
    assert side.alone == pytest.approx((5.0 * _CHUNKS, _CHUNKS / 8))
    assert side.plan is not None and side.plan.axis == "compute"
    assert "host" not in costs.links and costs.links["nvme"].samples == 0
    known = LearnedCosts()
    assume(known, [0.0, 1.0, 0.0])
    known.observe_load("nvme", 1000, 0.001)
    side = _side(found, known)
    side.make_plan(None)
    assert side.plan is not None and side.plan.axis == "load"
