"""kvctl config: the settings in use, where each comes from, and what waits for a restart."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator

from kvctl.admin import AdminSocket
from kvctl.exit_codes import USAGE, CommandError
from kvctl.output import Output
from kvstore_console.table import render_table
from kvstore_proto.v1 import admin_pb2 as wire

DEFAULT = "default"
_COLUMNS = ("SETTING", "VALUE", "IN FORCE", "FROM")


def config(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    reply = admin.call("Config", wire.ConfigRequest(), wire.ConfigReply)
    _check(arguments.names, reply.settings)
    chosen = [
        each
        for each in reply.settings
        if (not arguments.names or any(_is_part(_name(each), name) for name in arguments.names))
        and not (arguments.changed and each.origin == DEFAULT and not each.waiting)
    ]
    del reply.settings[:]
    reply.settings.extend(chosen)
    if arguments.toml:
        return Output("\n".join(_toml(reply)), reply)
    rows = [
        [_name(each), each.written, each.in_force, "command line" if each.origin == "--set" else each.origin]
        for each in chosen
    ]
    text = render_table(_COLUMNS, rows, empty="every setting is at its default")
    return Output("\n".join([text, *_waiting(reply)]), reply)


def _check(names: Iterable[str], settings: Iterable[wire.SettingStatus]) -> None:
    """Raises CommandError for a name that no setting has."""
    known = sorted({part for each in settings for part in (each.section, _name(each))})
    for name in names:
        if not any(_is_part(full, name) for full in known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "`kvctl config` lists all"
            raise CommandError(USAGE, f"config: no setting {name!r}; {hint}")


def _is_part(full: str, name: str) -> bool:
    return full == name or full.startswith(f"{name}.")


def _name(setting: wire.SettingStatus) -> str:
    return ".".join(filter(None, (setting.section, setting.tenant, setting.key)))


def _waiting(reply: wire.ConfigReply) -> Iterator[str]:
    for each in reply.settings:
        if each.waiting:
            yield f"{_name(each)} waits for a restart: the file says {each.waiting}"
    if reply.tenants_waiting:
        yield f"[[tenant]] waits for a restart: the file says {reply.tenants_waiting}"


def _toml(reply: wire.ConfigReply) -> Iterator[str]:
    """A file with which the daemon starts as it runs now."""
    source = "the built-in defaults" if reply.source == "defaults" else reply.source
    yield f"# The settings of a running kvstored: those of {source}, and of its command line."
    table = ""
    for each in reply.settings:
        heading = f"[[{each.section}]]" if each.tenant else f"[{each.section}]"
        if f"{heading}{each.tenant}" != table:
            table = f"{heading}{each.tenant}"
            yield f"\n{heading}"
        yield f"{each.key} = {each.written}"
