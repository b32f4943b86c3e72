"""Refuses requests while the queue is too long. Owns the limits; it never sees a request's content."""

_LEAST_RETRY_S = 1.0


class Overloaded(RuntimeError):
    """The request was not accepted; a retry after `retry_after_s` may be."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """At most `max_queued` sequences wait, none of them longer than `max_queue_s`, as far as can be expected."""

    def __init__(self, max_queued: int, max_queue_s: float) -> None:
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s

    def check(self, waiting: int, coming: int, expected_wait_s: float) -> None:
        """Overloaded if `coming` more sequences beside `waiting` ones are too many."""
        if not waiting:
            return
        if waiting + coming > self._max_queued:
            # The queue drains evenly: after that share of the wait there is room for these.
            too_many = waiting + coming - self._max_queued
            retry_s = max(_LEAST_RETRY_S, expected_wait_s * too_many / waiting)
            raise Overloaded(f"{waiting} requests are waiting, {self._max_queued} may", retry_s)
        if expected_wait_s > self._max_queue_s:
            retry_s = max(_LEAST_RETRY_S, expected_wait_s - self._max_queue_s)
            raise Overloaded(
                f"the wait is expected to be {expected_wait_s:.0f} s, over {self._max_queue_s:.0f} s", retry_s
            )
