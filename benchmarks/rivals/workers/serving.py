"""The child's end of a contender: answers JSON lines on standard input with JSON lines on what was standard output.

Runs in the environment of any rival, so it imports nothing but the standard library. What a rival prints goes to
standard error. An exception in an operation is an answer, not an end. Never measures: the operations do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping


def serve(operations: Mapping[str, Callable[..., object]]) -> None:
    """Say that it is ready, then answer `{"do": name, ...arguments}` until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(answers, {"ready": sorted(operations)})
    for line in sys.stdin:
        asked = json.loads(line)
        operation = operations[asked.pop("do")]
        try:
            _say(answers, {"result": operation(**asked)})
        except Exception as error:  # sent to the parent, which stops the comparison and shows it
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(answers: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]
