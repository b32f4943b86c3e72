"""The rate in bytes a second that copies may take of a device's link while an engine decodes, in the form that users
write.

The module only parses the text; `device.budget` keeps to the rate. It imports nothing of a device's library.
"""

from __future__ import annotations

from typing import Literal

from kvstore_console.units import parse_size

Rate = int | Literal["auto"] | None
"""Bytes a second; "auto": a share of what copies are seen to move; None: no limit."""
AUTO: Literal["auto"] = "auto"
OFF = "off"


def parse_rate(text: str) -> Rate:
    """Return the rate that `text` names: "auto", None for `off`, or bytes a second for a size such as 2GiB. Raises
    ValueError with a sentence for any other text.
    """
    if text == AUTO:
        return AUTO
    if text == OFF:
        return None
    wanted = f"a rate is auto, off or bytes a second such as 2GiB, got {text!r}"
    try:
        nbytes = parse_size(text)
    except ValueError:
        raise ValueError(wanted) from None
    if nbytes < 1:
        raise ValueError(wanted)
    return nbytes
