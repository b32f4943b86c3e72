"""The choice "auto": a codec pays where reading less and decoding takes less time than reading the payload."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.codec_rates import FEWEST_RUNS, FEWEST_SERVED, RUNS, SOME, CodecRates, CoreRate, SteadyRate
from kvstore_tiers.codecs import Codec, Encoded
from kvstore_tiers.codecs.measured import Measured
from kvstored.store.transfer.codec_choice import MEASURE_AGAIN_S, TRY_AGAIN_S, CodecChoice, read_s

BLOCK_BYTES, GB = 1_474_560, 1e9


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Named(Codec):
    def __init__(self, number: int, *, is_lossy: bool) -> None:
        self.name, self.number, self.is_lossy = f"codec {number}", number, is_lossy  # type: ignore[misc]

    def bound(self, payload_bytes: int) -> int:
        return payload_bytes

    def encode(self, header: BlockHeader, shape: object, payload: memoryview, target: memoryview) -> Encoded:
        raise AssertionError("only its facts are asked for")

    def decode(self, stored: memoryview, payload: memoryview) -> None:
        raise AssertionError("only its facts are asked for")


LOSSY, EXACT = Named(3, is_lossy=True), Named(1, is_lossy=False)


def rates_of(medium: float, decoding: dict[Codec, float], ratios: dict[Codec, float]) -> CodecRates:
    """Rates in GB/s, as if they had been measured."""
    hand = Hand()
    rates = CodecRates(hand, hand)
    for _ in range(FEWEST_RUNS if medium else 0):
        with rates.medium.work(1 << 20):
            hand.now_s += (1 << 20) / (medium * GB)
    for codec, rate in decoding.items():
        for _ in range(FEWEST_RUNS):
            decode(rates, codec, hand, rate)
    for codec, ratio in ratios.items():
        rates.shrank(codec.number, round(1000 * ratio), 1000)
    return rates


def decode(rates: CodecRates, codec: Codec, hand: Hand, rate: float, threads: int = 1) -> None:
    """Measure decoding by `threads` threads at a time, each of which has a core that does `rate` GB/s."""
    together, core = rates.decoding[codec.number], rates.decoding_core[codec.number]
    with ExitStack() as stack:
        for _ in range(threads):
            stack.enter_context(together.work(BLOCK_BYTES))
        began = core.begin()
        hand.now_s += BLOCK_BYTES / (rate * GB)
        for _ in range(threads):
            core.end(began, BLOCK_BYTES)


def read(rates: CodecRates, form: int, hand: Hand, rate: float) -> None:
    """Note the processor time of reads in a form: 0 for as they are, or the number of a codec."""
    core = rates.read_core[form]
    for _ in range(FEWEST_RUNS):
        began = core.begin()
        hand.now_s += BLOCK_BYTES / (rate * GB)
        core.end(began, BLOCK_BYTES)


def test_whole_gets_of_both_forms_decide_while_they_are_recent() -> None:
    rates = rates_of(1, {EXACT: 3.2}, {EXACT: 1.5})
    choice, hand = choice_of(rates), rates.medium._seconds
    assert isinstance(hand, Hand) and choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT

    def serve(codec: int, rate: float) -> None:
        for _ in range(RUNS):
            with rates.served[codec].work(BLOCK_BYTES):
                hand.now_s += BLOCK_BYTES / (rate * GB)

    serve(0, 0.9)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT, "no get of the codec was measured"
    serve(EXACT.number, 0.92)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None, "two cores are full, perhaps"
    serve(EXACT.number, 2.0)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT
    serve(0, 3.0)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None
    hand.now_s += 61
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT, "it is tried again"


def test_whole_gets_that_stalled_now_and_then_decide_nothing() -> None:
    rates = rates_of(3, {EXACT: 13.5}, {EXACT: 1.96})
    choice, hand = choice_of(rates), rates.medium._seconds
    assert isinstance(hand, Hand)
    for codec, rate in ((0, 2.9), (EXACT.number, 5.6)):
        for number in range(FEWEST_SERVED):
            with rates.served[codec].work(BLOCK_BYTES):
                hand.now_s += BLOCK_BYTES / (rate * GB) if number else 0.03  # memory is touched for the first time
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT


def test_a_codec_pays_where_threads_decode_side_by_side() -> None:
    rates = rates_of(1, {}, {EXACT: 1.19})
    choice, hand = choice_of(rates, blocks=48), rates.medium._seconds
    assert isinstance(hand, Hand)
    for _ in range(RUNS):
        decode(rates, EXACT, hand, 0.83)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None, "one thread is slower than the medium"
    for _ in range(RUNS):
        decode(rates, EXACT, hand, 0.83, threads=2)
    assert rates.decoding[EXACT.number].bytes_per_s == pytest.approx(1.66 * GB)
    assert rates.decoding_core[EXACT.number].bytes_per_s == pytest.approx(0.83 * GB)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT
    assert choice_of(rates, blocks=1).choose(BLOCK_BYTES, takes_lossy=False) is None, "one thread decodes a block"


def test_a_block_among_others_of_another_form_says_what_decoding_costs_and_not_what_gets_reach() -> None:
    rates = rates_of(1, {}, {EXACT: 1.5})
    choice, hand = choice_of(rates), rates.medium._seconds
    assert isinstance(hand, Hand)
    coded, plain = rates.served[EXACT.number], rates.served[0]
    for _ in range(FEWEST_RUNS):
        decode(rates, EXACT, hand, 1.2, threads=2)
    for _ in range(RUNS - 2 * FEWEST_RUNS):
        with plain.work(BLOCK_BYTES), plain.work(BLOCK_BYTES), plain.work(BLOCK_BYTES), coded.work(BLOCK_BYTES):
            hand.now_s += BLOCK_BYTES / (0.9 * GB) * 4  # the block waited for the others, on no core
    assert coded.recent_bytes_per_s < plain.recent_bytes_per_s / 2
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT


def choice_of(rates: CodecRates, blocks: float = 8) -> CodecChoice:
    return CodecChoice([LOSSY, EXACT], rates, lambda nbytes: blocks, lambda codec: None, Hand())


def test_a_codec_that_reads_decode_slower_than_measurements_is_judged_by_reads() -> None:
    rates = rates_of(3, {EXACT: 20}, {EXACT: 1.96})
    choice, hand = choice_of(rates), rates.medium._seconds
    assert isinstance(hand, Hand) and choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT
    read(rates, EXACT.number, hand, 1.5)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None
    hand.now_s += 61
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT, "cores may be idle again"


def test_reads_that_keep_the_cores_busy_without_a_codec_gain_by_a_quick_one_alone() -> None:
    rates = rates_of(3, {EXACT: 5}, {EXACT: 1.96})
    choice, hand = choice_of(rates, blocks=48), rates.medium._seconds
    assert isinstance(hand, Hand) and choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT
    read(rates, 0, hand, 3.0)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None
    read(rates, EXACT.number, hand, 20)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT, "fewer bytes are read and checked"


def test_waiting_is_no_work_of_a_core() -> None:
    passed, worked = Hand(), Hand()
    rate = CoreRate(passed, worked)
    for number in range(FEWEST_RUNS):
        assert rate.bytes_per_s == 0
        began = rate.begin()
        passed.now_s += number  # for the interpreter, or a core
        worked.now_s += 1
        rate.end(began, 1000)
    assert rate.bytes_per_s == rate.recent_bytes_per_s == 1000 and rate.total_s == sum(range(FEWEST_RUNS))
    passed.now_s += 61
    assert rate.bytes_per_s == 1000 and rate.recent_bytes_per_s == 0


@pytest.mark.parametrize(
    ("medium", "decoding", "ratio", "chosen"),
    [
        (1, 1.17, 1.29, False),  # a get needs cores for more than decoding
        (1, 3.2, 1.16, True),
        (1, 1.9, 1.21, True),
        (3, 3.2, 1.16, False),  # decoding is no faster than the link
        (3, 2.0, 1.48, False),
        (3, 26.0, 1.96, True),
        (20, 12.0, 1.96, False),
        (0, 26.0, 1.96, False),  # nothing was read yet
        (1, 26.0, 1.03, False),  # not worthwhile
    ],
)
def test_a_codec_is_chosen_where_it_pays(medium: float, decoding: float, ratio: float, chosen: bool) -> None:
    choice = choice_of(rates_of(medium, {EXACT: decoding}, {EXACT: ratio}))
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is (EXACT if chosen else None)


def test_what_is_chosen_is_never_slower_than_no_codec() -> None:
    chosen = np.random.default_rng(1)
    for _ in range(2000):
        medium, decoding = (float(10 ** chosen.uniform(-1.5, 1.5)) for _ in range(2))
        ratio, blocks = float(chosen.uniform(0.9, 3)), float(chosen.integers(1, 64))
        choice = choice_of(rates_of(medium, {EXACT: decoding}, {EXACT: ratio}), blocks)
        reading_s, decoding_s = BLOCK_BYTES / ratio / (medium * GB), BLOCK_BYTES / (decoding * GB)
        coded_s = read_s(blocks, reading_s, decoding_s, decoding_s)
        if choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT:
            assert coded_s <= blocks * BLOCK_BYTES / (medium * GB)


def test_a_get_of_one_block_waits_for_its_decoding() -> None:
    rates = rates_of(1, {EXACT: 3.2}, {EXACT: 1.16})
    assert choice_of(rates, blocks=1).choose(BLOCK_BYTES, takes_lossy=False) is None
    assert choice_of(rates, blocks=16).choose(BLOCK_BYTES, takes_lossy=False) is EXACT


def test_a_lossy_codec_is_for_blocks_that_take_it() -> None:
    choice = choice_of(rates_of(1, {LOSSY: 26, EXACT: 3.2}, {LOSSY: 1.96, EXACT: 1.16}))
    assert choice.choose(BLOCK_BYTES, takes_lossy=True) is LOSSY
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT


def test_one_block_of_each_size_is_tried_and_says_what_the_codec_makes_of_a_model() -> None:
    rates = rates_of(1, {EXACT: 3.2}, {})
    rates.guess_ratio(EXACT.number, 1030, 1000)
    hand = Hand()
    choice = CodecChoice([LOSSY, EXACT], rates, lambda nbytes: 8, lambda codec: None, hand)

    def tried(nbytes: int = BLOCK_BYTES, takes_lossy: bool = False) -> Codec | None:
        return choice.choose_to_try(nbytes, takes_lossy=takes_lossy)

    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is None, "a made-up block gains too little"
    assert tried(takes_lossy=True) is EXACT, "the rate of the other is not known"
    assert tried() is None and tried(2 * BLOCK_BYTES) is EXACT
    rates.shrank(EXACT.number, 1500, 1000)
    assert choice.choose(BLOCK_BYTES, takes_lossy=False) is EXACT
    hand.now_s += TRY_AGAIN_S
    assert tried() is EXACT, "the model may be another"


def test_a_lossy_codec_is_tried_on_blocks_that_take_it() -> None:
    choice = choice_of(rates_of(1, {LOSSY: 26}, {}))
    assert choice.choose_to_try(BLOCK_BYTES, takes_lossy=False) is None
    assert choice.choose_to_try(BLOCK_BYTES, takes_lossy=True) is LOSSY


def test_codecs_are_measured_at_the_start_and_from_time_to_time() -> None:
    asked, hand = list[Codec](), Hand()
    choice = CodecChoice([LOSSY, EXACT], CodecRates(), lambda nbytes: 1, asked.append, hand)
    choice.measure_again()
    choice.choose(BLOCK_BYTES, takes_lossy=True)
    assert asked == [LOSSY, EXACT]
    hand.now_s += MEASURE_AGAIN_S
    choice.choose(BLOCK_BYTES, takes_lossy=True)
    assert asked == [LOSSY, EXACT] * 2


def test_reads_side_by_side_count_their_time_once_and_failed_ones_no_bytes() -> None:
    hand = Hand()
    rate = SteadyRate(hand, part=SOME)
    for _ in range(FEWEST_RUNS):
        with rate.work(8 << 20), rate.work(8 << 20):
            hand.now_s += 1
        hand.now_s += 5  # nothing is read meanwhile
    assert rate.bytes_per_s == 16 << 20
    for _ in range(RUNS):
        with suppress(OSError), rate.work(8 << 20):
            hand.now_s += 1
            raise OSError
    assert rate.bytes_per_s == 16 << 20


def test_a_medium_is_as_quick_as_reads_that_wait_for_nothing_else() -> None:
    """Half of the reads wait for a core or for the interpreter, and the medium is idle."""
    hand, rates = Hand(), CodecRates()
    rates.medium._seconds = hand
    for number in range(RUNS):
        with rates.medium.work(1 << 20):
            hand.now_s += (1 << 20) / (3 * GB) + (0.005 if number % 2 else 0)
    assert rates.medium.bytes_per_s == pytest.approx(3 * GB)
    for _ in range(RUNS):
        with rates.medium.work(1 << 20):
            hand.now_s += (1 << 20) / (1 * GB)
    assert rates.medium.bytes_per_s == pytest.approx(1 * GB), "it became slower"


def test_a_run_that_lost_its_core_says_nothing_of_the_codec() -> None:
    hand = Hand()
    rate = SteadyRate(hand)
    for number in range(9):
        assert rate.bytes_per_s == 0 or number >= FEWEST_RUNS
        with rate.work(1000):
            hand.now_s += 10 if number % 5 == 0 else 0.001
    assert rate.bytes_per_s == pytest.approx(1e6)
    for _ in range(5):
        with rate.work(1000):
            hand.now_s += 10
    assert rate.bytes_per_s == pytest.approx(100), "there is no core to spare"


def test_a_codec_of_this_build_can_be_measured() -> None:
    from kvstore_tiers.codecs import codec_named

    codec, rates = codec_named("int8"), CodecRates()
    assert codec is not None
    Measured(codec, rates).measure()
    assert rates.decoding[codec.number].bytes_per_s > 0 and rates.encoding[codec.number].bytes_per_s > 0
    assert 1.9 < rates.ratio(codec.number) < 2


def test_a_codec_is_measured_on_all_threads_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet in every decoding, or it breaks."""
    meeting = threading.Barrier(2)

    class Meets(Named):
        def encode(self, header: BlockHeader, shape: object, payload: memoryview, target: memoryview) -> Encoded:
            return Encoded(len(payload) // 2)

        def decode(self, stored: memoryview, payload: memoryview) -> None:
            meeting.wait(timeout=60)

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    rates = CodecRates()
    rates.threads = 4
    Measured(Meets(9, is_lossy=False), rates).measure()
    assert rates.decoding[9].runs_at_a_time > 1.5 and rates.decoding[9].bytes_per_s > 0
