"""Small files that spare work in the next process, and are not missed where they cannot be written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from kvstore_proto.replaced_file import replaced_file, usual_mode


def write_json(path: Path, value: Any) -> None:
    """Replace the file at `path` by `value` as JSON; do nothing where it cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path, durable=False, mode=usual_mode(), is_shared=True) as file:
            file.write(json.dumps(value, indent=1).encode())
