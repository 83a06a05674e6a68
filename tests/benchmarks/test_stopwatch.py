import gc

from benchmarks.stopwatch import Timing, interleave, steady_heap


def test_interleave_takes_turns_and_leaves_the_first_round_out() -> None:
    turns: list[str] = []

    def work(name: str, seconds: float) -> float:
        turns.append(name)
        return seconds * len(turns)

    timings = interleave({"a": lambda: work("a", 1.0), "b": lambda: work("b", 10.0)}, 2)

    assert turns == ["a", "b"] * 3
    assert timings == {"a": Timing((3.0, 5.0)), "b": Timing((40.0, 60.0))}


def test_timing_names_median_best_and_worst() -> None:
    timing = Timing((3.0, 1.0, 2.0, 9.0, 4.0))

    assert (timing.median_s, timing.best_s, timing.worst_s) == (3.0, 1.0, 9.0)


def test_steady_heap_hides_what_exists_and_gives_it_back() -> None:
    before = gc.get_freeze_count()
    with steady_heap():
        assert gc.get_freeze_count() > before
        assert gc.isenabled()

    assert gc.get_freeze_count() == 0
