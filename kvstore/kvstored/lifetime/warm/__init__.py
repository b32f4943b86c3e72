"""Warm restart: DRAM blocks and their readers' leases outlive the daemon. See docs/warm-restart.md."""

from kvstored.lifetime.warm.former_clients import FormerClients
from kvstored.lifetime.warm.keeper import KeeperError
from kvstored.lifetime.warm.restart import Adopted, WarmRestart, open_warm

__all__ = ["Adopted", "FormerClients", "KeeperError", "WarmRestart", "open_warm"]
