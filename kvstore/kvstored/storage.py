"""The contents of a node, opened in order: tenants, tiers with their surviving blocks, residency, and the store over
them.

The module owns the order of a start: identity before tiers, tiers before residency, recovery before policies. It serves
no client.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_proto.state_identity import read_ownership
from kvstore_tiers.base import Tier
from kvstore_tiers.codecs.profiles import ProfileError, Profiles, read_profiles
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.data_keys import NoDataKeys
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstored.admin.lifetime import DaemonState, Phase
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.reach import follow_users
from kvstored.clients.tenants.tokens import names_in
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, ConfigError
from kvstored.config.private_input import read_secret
from kvstored.config.tiers import Cluster, Start
from kvstored.lifetime.recovery import drop_blocks, recover_blocks
from kvstored.lifetime.warm import FormerClients
from kvstored.lifetime.warm.ledger import CHUNKS_A_TIER
from kvstored.lifetime.warm.node_memory import NodeMemory
from kvstored.state.process import StateProcess
from kvstored.state.saver import StateSaver
from kvstored.state.terms import TermsKeeper
from kvstored.store.assembly import Store
from kvstored.store.residency import make_residency
from kvstored.unsaved import Unsaved

if TYPE_CHECKING:  # its library is in an extra
    from kvstored.clients.tenants.data_keys import DataKeyFile

log = logging.getLogger(__name__)
CLUSTER, MASTER_KEY = b"kvstore cluster", b"kvstore master"


class NodeStorage(NamedTuple):
    """The opened storage of a node: the store of blocks, the tenants, and the saved state. `former` has the clients of
    the former process, None if memory is not kept over a restart."""

    tenants: TenantDirectory
    store: Store
    former: FormerClients | None
    state: StateProcess
    saver: StateSaver
    unsaved: Unsaved


def open_storage(
    config: Config,
    clock: Clock,
    memory: NodeMemory,
    phase: Phase,
    stack: AsyncExitStack,
    state: StateProcess,
    early_scan: EarlyRecordScan | None,
    *,
    new_secret: bool,
) -> NodeStorage:
    """Open the tenants, tiers and store of a node, and return them; `stack` closes them. `state` is the process with
    the saved state, which is read later. With `new_secret`, stored blocks whose keys cannot be made from the secret are
    dropped. Raises the errors of the parts."""
    unsaved, state_dir = Unsaved(), config.daemon.state_dir
    keyring = _open_keyring(config, unsaved, new_secret=new_secret)
    tenants = TenantDirectory(state_dir, config.tenants, config.tenant_default, keyring)
    stack.callback(lambda: memory.close(has_served=phase.has_served))
    keys = tenants.data_keys = _open_data_keys(config, tenants, new_secret=new_secret)
    state.keys = keys
    start = Start(
        early_scan=early_scan, cluster=Cluster(keyring.secret, tenants.remote_mode), encrypts=keys is not None,
        keys=keys or NoDataKeys(are_complete=new_secret),
    )  # fmt: skip
    tiers = open_tiers(config, memory, memory.open(forget=keyring.dram_is_lost), start, stack)
    residency = make_residency(config, tiers)
    residency.window_of, profiles = tenants.window_blocks, _read_profiles(config.daemon.codec_profiles)
    residency.shape_of = lambda digest, group, nbytes: profiles.shape_of(tenants.fingerprint(digest), group, nbytes)
    durable = tiers[residency.durable] if residency.durable >= 0 else None
    if durable is not None and keyring.nvme_is_lost:
        drop_blocks(durable)
    elif durable is not None and (recovered := recover_blocks(durable, residency, tenants, clock)):
        log.info("%d blocks found on NVMe", recovered)
    keyring.begin()  # with what `TenantDirectory` claimed
    memory.adopt(tiers, residency, tenants, clock)
    store = Store(config, clock, CompletionQueue(asyncio.get_running_loop()), residency, tiers)
    former = memory.restore_clients(store, clock)
    if former is not None:
        stack.callback(former.close)
        phase.on_change.append(partial(_keep_leases, former, memory))
    terms = TermsKeeper(state, store.retention, unsaved, state_dir)
    saver = StateSaver(state, store, tenants, unsaved, config.daemon.state_rate_bytes, terms)
    stack.push_async_callback(saver.save, is_last=True)
    stack.push_async_callback(store.endurance.close)
    try:
        follow_users(tenants, residency, names_in(config.unary.tokens_in_use))
    except OSError as error:
        cost = "what users stored does not follow them to tenants that are newly listed, until a restart"
        unsaved.failed(keyring.path, error, cost)
    return NodeStorage(tenants, store, former, state, saver, unsaved)


def _read_profiles(directory: Path | None) -> Profiles:
    try:
        return read_profiles(directory)
    except ProfileError as error:
        raise ConfigError(f"daemon.codec_profiles: {error}") from None


def _keep_leases(former: FormerClients, memory: NodeMemory, state: DaemonState) -> None:
    """Let a client that leaves while the daemon stops find its leases at the next process, if that process has the
    memory.
    """
    former.keeps_leases = state is DaemonState.STOPPING and not memory.is_forgotten


def open_tiers(config: Config, memory: NodeMemory, mapped: Tier, start: Start, stack: AsyncExitStack) -> list[Tier]:
    """Open all tiers and return them, fastest first. `mapped`, the tier that clients map, is open already; `stack`
    closes the others.
    """
    tiers = []
    for position, section in enumerate(config.tiers):
        if section is config.host:
            tiers.append(mapped)
            continue
        tier = section.open(memory.start_of_device(start, DEVICE_ARENAS + position * CHUNKS_A_TIER))
        tiers.append(tier)
        stack.callback(tier.close)
        memory.charge_beside(tier)
    stack.callback(memory.settle)  # before tiers close what may not be kept yet
    borrowers = [tier for tier in tiers if tier.info.shares_memory]
    for tier in tiers:
        if isinstance(tier, HostTier):
            tier.lend_to(borrowers)
    return tiers


def _open_data_keys(config: Config, tenants: TenantDirectory, *, new_secret: bool) -> DataKeyFile | None:
    """Return the keys of what is encrypted at rest; None without a master key. Raises ConfigError and OSError."""
    section = config.encryption
    master = read_secret("encryption.key_file", section.key_file, MASTER_KEY)
    if master is None:
        return None
    from kvstored.clients.tenants.data_keys import DataKeyFile

    tenants.encrypts_by_default = section.default
    former = read_secret("encryption.former_key_file", section.former_key_file, MASTER_KEY)
    keys = DataKeyFile(config.daemon.state_dir, master, tenants.encrypts, former=former, anew=new_secret)
    if keys.rewrapped:
        log.info("%s is under the master key of encryption.key_file now: the former one opens nothing", keys.path)
    return keys


def _open_keyring(config: Config, unsaved: Unsaved, *, new_secret: bool) -> Keyring:
    nvme, state_dir = config.nvme, config.daemon.state_dir
    nvme_dir = nvme.path if nvme.enabled else None
    if nvme_dir is not None and nvme_dir.is_dir() and read_ownership(state_dir, nvme_dir).problem:
        TierDirectory(nvme_dir, create=False).close()  # that another daemon has it is the better reason
    given = read_secret("cluster.secret_file", config.cluster.secret_file, CLUSTER)
    return Keyring(state_dir, nvme_dir, new_secret=new_secret, given=given, unsaved=unsaved)
