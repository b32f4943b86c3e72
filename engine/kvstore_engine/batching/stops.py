"""Watches an answer's text for stop strings.

Owns the text that could still become one. Invariant: what `push` has returned contains no stop string and ends in no
part of one, however the text was cut into pieces.
"""


class StopStrings:
    """The stop strings of one answer. The first that is complete ends it; of several complete at once the longest."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What can be shown now that `text` has come, and whether a stop string is complete."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)[1]], True
        keep = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def finish(self) -> str:
        """The text held back, since no more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        most = min(len(text), len(stop) - 1)
        return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
