"""kvctl quarantine: which slots failed verification and are kept out of use, and giving them back.

Shows keys, sizes and reasons; bytes of a block never travel here. Who may look at them is who may read the slab file.
"""

from __future__ import annotations

import argparse

from kvctl.admin import AdminSocket
from kvctl.output import Output
from kvctl.show import KEY_DIGITS
from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_count, plural
from kvstore_proto.v1 import admin_pb2 as wire

_HEADINGS = ("PLACE", "KEY", "TENANT", ">SIZE", "STORED AGAIN", "REASON", "LOCATION")


def quarantine(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    return _list(admin) if arguments.action == "list" else _release(admin, arguments)


def _list(admin: AdminSocket) -> Output:
    reply = admin.call("Quarantine", wire.QuarantineRequest(), wire.QuarantineReply)
    rows = [
        [
            f"{slot.slab}:{slot.offset}", slot.key[:KEY_DIGITS] or "-", slot.tenant or "-", human_bytes(slot.bytes),
            "yes" if slot.stored_again else "no", slot.reason, slot.location,
        ]
        for slot in reply.slots
    ]  # fmt: skip
    text = render_table(_HEADINGS, rows, empty="nothing is in quarantine")
    if rows:
        text += f"\n{human_count(len(rows))} of at most {human_count(reply.limit)} slots (nvme.quarantine_slots)"
    return Output(text, reply)


def _release(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.ReleaseQuarantineRequest(locations=arguments.places, all=arguments.all)
    reply = admin.call("ReleaseQuarantine", request, wire.ReleaseQuarantineReply)
    released = f"{plural(reply.released, 'slot')} ({human_bytes(reply.released_bytes)})"
    return Output(f"released {released}: free for other blocks", reply)
