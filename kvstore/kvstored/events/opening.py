"""Opens KV events by the configuration: the process that publishes, and the feed that residency notifies."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore_proto.version import pip_install
from kvstore_tiers.base import TierInfo
from kvstored.clients.tenants import TenantDirectory
from kvstored.config import ConfigError
from kvstored.config.addresses import address_of, numeric
from kvstored.config.events import TCP
from kvstored.config.schema import EventsSection
from kvstored.events.encoding import CopyPlace
from kvstored.events.feed import EventFeed
from kvstored.events.history import PublishedBefore
from kvstored.events.publisher import EXTRA, Publisher, PublisherError
from kvstored.store.assembly import Store

log = logging.getLogger(__name__)
LOCAL = ("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_NOT_IN_TOPICS = re.compile(r"[@\s\x00-\x1f]")


def place_of(info: TierInfo) -> CopyPlace:
    """Return how KV events name the place of the copies in a tier. `info` describes the tier."""
    if info.kind == "keyed":
        return CopyPlace("STORAGE", "REMOTE")
    if info.kind == "gpu":
        return CopyPlace("GPU")
    return CopyPlace("CPU" if info.is_in_memory else "STORAGE")


@dataclass(frozen=True)
class TopicNames:
    """A maker of topic names for KV events, from the pattern `section.topic`. A separator inside a tenant's or model's
    name is replaced by "_"."""

    section: EventsSection
    node: str

    def topic(self, tenant: str, model: str) -> bytes:
        words = {"node": self.node, "tenant": tenant, "model": model}
        plain = {name: _NOT_IN_TOPICS.sub("_", word) for name, word in words.items()}
        return self.section.topic.format_map(plain).encode()


def open_events(
    section: EventsSection, state_dir: Path, tenants: TenantDirectory, store: Store, stack: AsyncExitStack
) -> None:
    """Start to publish KV events as `section` says; `stack` ends it. Raises PublisherError."""
    missing = [name for name, module in (("pyzmq", "zmq"), ("msgspec", "msgspec")) if not _is_there(module)]
    if missing:
        raise PublisherError(
            f"events.listen is set, but {' and '.join(missing)} cannot be loaded: {pip_install(EXTRA)}"
        )
    if section.tokens and not section.listen.startswith(LOCAL):
        log.warning("KV events with token ids are published on %s: who connects there reads prompts", section.listen)
    residency, names = store.residency, TopicNames(section, section.node or socket.gethostname())
    places = [place_of(tier.info) for tier in store.tiers]
    before = PublishedBefore(state_dir)
    publisher = Publisher(
        {
            "listen": _numeric("listen", section.listen), "replay": _numeric("replay", section.replay),
            "encoding": section.encoding, "buffer": section.buffer, "places": places,
            "connections": section.connections,
        },
        before, store.counters,
    )  # fmt: skip
    stack.callback(publisher.close)

    def kind_text(number: int) -> tuple[bytes, int] | None:
        kind = residency.kinds[number]
        tenant = tenants.name_of_index(residency.tenants[kind.tenant].name)
        if section.tenant and tenant != section.tenant:
            return None
        digest = tenants.fingerprint_digest(kind.fingerprint_id)
        fingerprint = tenants.fingerprint(digest)
        model = digest.hex()[:12] if fingerprint is None else fingerprint.model_name
        topic = names.topic(tenant, model)
        before.note(topic.decode())
        return topic, 0 if fingerprint is None else fingerprint.block_tokens

    call_later = asyncio.get_running_loop().call_later
    feed = EventFeed(residency, store.tiers if section.tokens else (), kind_text, publisher, call_later)
    stack.callback(feed.stop)
    publisher.start(feed.announce_all)
    log.info("KV events are published on %s", section.listen)


def _numeric(name: str, address: str) -> str:
    """Return a ZMQ address to bind, with the host's number, since ZMQ binds no names of hosts. Raises PublisherError
    for an unknown name.
    """
    if not address.startswith(TCP):
        return address
    setting = f"events.{name}"
    try:
        return f"{TCP}{numeric(setting, address_of(setting, address, '', TCP))}"
    except ConfigError as error:
        raise PublisherError(str(error)) from None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
