"""Computing goes up, loading goes down, and every chunk is present in the end, whatever becomes of the loads."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvstore_restore.pointers import Pointers, State, turn


def test_the_two_meet() -> None:
    pointers = Pointers(["host"] * 4)
    assert pointers.next_compute() == 0
    assert pointers.next_compute() is None  # one step at a time
    assert pointers.next_load("host") == 3
    assert pointers.loaded_chunk(3)
    assert pointers.next_load("host") == 2
    assert pointers.computed_chunk(0)
    assert pointers.next_compute() == 1
    assert pointers.next_load("host") is None
    assert pointers.loaded_chunk(2)
    assert not pointers.is_done
    assert pointers.computed_chunk(1)
    assert pointers.is_done
    assert (pointers.computed, pointers.loaded, pointers.wasted) == (2, 2, 0)


def test_the_last_chunk_under_load_is_computed_as_well_and_counts_once() -> None:
    pointers = Pointers(["host"])
    assert pointers.next_load("host") == 0
    assert pointers.next_compute() == 0
    assert pointers.computed_chunk(0)
    assert pointers.is_done
    assert not pointers.loaded_chunk(0)
    assert (pointers.computed, pointers.loaded, pointers.wasted) == (1, 0, 1)


def test_computing_leaves_a_chunk_that_it_cannot_overtake_to_the_load() -> None:
    pointers = Pointers(["host"], overtakes=lambda chunk: False)
    pointers.next_load("host")
    assert pointers.next_compute() is None
    pointers.lose(0)  # it stalls
    assert pointers.state(0) is State.LOST
    assert pointers.next_compute() == 0


def test_a_tier_has_its_own_pointer() -> None:
    pointers = Pointers(["nvme", "host", "nvme", "host"])
    assert pointers.next_load("host") == 3
    assert pointers.next_load("nvme") == 2
    assert pointers.stored("host") == [1]
    assert pointers.next_load("nvme") == 0
    assert pointers.next_load("s3") is None


def test_a_plan_of_one_path_keeps_to_it_until_a_chunk_is_lost() -> None:
    loads = Pointers(["host"] * 3, computes=False)
    assert loads.next_compute() is None
    loads.lose_all()
    assert loads.next_load("host") is None
    assert loads.next_compute() == 0
    computes = Pointers(["host"] * 3, loads=False)
    assert computes.next_load("host") is None
    assert computes.next_compute() == 0


def test_what_is_cancelled_does_nothing_more() -> None:
    pointers = Pointers(["host"] * 3)
    pointers.next_compute()
    pointers.cancel()
    assert pointers.is_done
    assert pointers.next_load("host") is None
    assert pointers.next_compute() is None
    assert not pointers.computed_chunk(0)
    assert pointers.wasted == 0


def test_a_step_that_failed_is_begun_again() -> None:
    pointers = Pointers(["host"])
    assert pointers.next_compute() == 0
    pointers.abandon(0)
    assert pointers.next_compute() == 0


@given(st.lists(st.sampled_from(["host", "nvme"]), max_size=12), st.integers(0, 1 << 30))
def test_every_chunk_is_present_once_whatever_becomes_of_the_loads(tiers: list[str], seed: int) -> None:
    random = Random(seed)
    pointers = Pointers(tiers, overtakes=lambda chunk: random.random() < 0.5)
    loading: list[int] = []
    computing: int | None = None
    counted: list[int] = []
    for _ in range(2000):
        if pointers.is_done:
            break
        what = random.randrange(5)
        if what == 0 and (chunk := pointers.next_load(random.choice(["host", "nvme"]))) is not None:
            loading.append(chunk)
        elif what == 1 and computing is None:
            computing = pointers.next_compute()
            assert computing is None or computing == pointers.head
        elif what == 2 and computing is not None:
            counted += [computing] * pointers.computed_chunk(computing)
            computing = None
        elif what == 3 and loading:
            chunk = loading.pop(random.randrange(len(loading)))
            counted += [chunk] * pointers.loaded_chunk(chunk)
        elif what == 4 and loading:
            pointers.lose(loading.pop(random.randrange(len(loading))))
    assert pointers.is_done
    assert sorted(counted) == list(range(len(tiers)))
    assert pointers.computed + pointers.loaded == len(tiers)


def test_the_shortest_is_first_and_waiting_counts() -> None:
    assert turn(2, 1.0) < turn(10, 1.0) < turn(30, 1.0)
    assert turn(10, 2.0) < turn(2, 1.0), "a second of waiting counts for 16 chunks"
