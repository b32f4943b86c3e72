"""Says no while the queue is too long, and when to come again.

Owns the limits. It never looks at a request's content.
"""

_LEAST_RETRY_S = 1.0


class Overloaded(RuntimeError):
    """The request was not taken in; coming back after `retry_after_s` has a chance."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """At most `max_queued` sequences wait, and none that is expected to wait longer than `max_queue_s`."""

    def __init__(self, max_queued: int, max_queue_s: float) -> None:
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s

    def check(self, waiting: int, coming: int, expected_wait_s: float) -> None:
        """`coming` more sequences beside `waiting` that wait; Overloaded if that is too many."""
        if not waiting:
            return
        if waiting + coming > self._max_queued:
            # The queue drains evenly: that share of the wait has passed when there is room for these.
            too_many = waiting + coming - self._max_queued
            retry_s = max(_LEAST_RETRY_S, expected_wait_s * too_many / waiting)
            raise Overloaded(f"{waiting} requests are waiting, {self._max_queued} may", retry_s)
        if expected_wait_s > self._max_queue_s:
            retry_s = max(_LEAST_RETRY_S, expected_wait_s - self._max_queue_s)
            raise Overloaded(
                f"the wait is expected to be {expected_wait_s:.0f} s, over {self._max_queue_s:.0f} s", retry_s
            )
