"""The settings for an operator: each one as written, as in force, and its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvstore_console.units import human_bytes, parse_size
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.reload import Reload
from kvstored.config import Config, ConfiguredSetting


def settings(reload: Reload) -> pb.ConfigReply:
    """Return the settings in force, with their text and origin, and the settings that wait for a restart since the last
    reload. Files with secrets are shown by name, never by content.
    """
    config = reload.config
    waiting = {each.name: each.after for each in reload.waiting}
    reply = pb.ConfigReply(source=config.source, tenants_waiting=waiting.get("[[tenant]]", ""))
    for each in {each.name: each for each in config.written}.values():
        reply.settings.add(
            section=each.section, key=each.key, tenant=each.tenant, written=toml_value(each.value),
            in_force=in_force(config, each), origin=each.origin, waiting=waiting.get(each.name, ""),
        )  # fmt: skip
    return reply


def in_force(config: Config, setting: ConfiguredSetting) -> str:
    """Return the effective value of `setting` if its text does not show it (a share, "auto", a relative path, a size
    that was rounded), otherwise "".
    """
    section: Any = config.tier(setting.section) or getattr(config, setting.section, None)
    key = setting.key
    if setting.tenant:
        section = next((tenant for tenant in config.tenants if tenant.name == setting.tenant), None)
        tier, _, what = key.rpartition("_")
        if section is not None and config.tier(tier) is not None:
            section, key = section.share(tier), what
    nbytes = getattr(section, f"{key}_bytes", None)
    if nbytes is not None:
        return "" if _bytes_of(setting.value) == nbytes else human_bytes(nbytes)
    value = getattr(section, setting.key, None)
    return str(value) if isinstance(value, Path) and str(value) != setting.value else ""


def toml_value(value: Any) -> str:
    """Return `value` as it is written in a TOML file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # all else JSON and TOML escape alike
    return str(value)


def _bytes_of(value: Any) -> int | None:
    """Return the bytes of a size; None for a share and for "auto", which give no number of bytes by themselves."""
    try:
        return parse_size(value)
    except ValueError:
        return None
