"""Warm restart: DRAM blocks and their readers' leases outlive the daemon. See docs/warm-restart.md."""

from kvstored.lifetime.warm.descriptor_holder import HolderError
from kvstored.lifetime.warm.former_clients import FormerClients
from kvstored.lifetime.warm.restart import Adopted, WarmRestart, open_warm

__all__ = ["Adopted", "FormerClients", "HolderError", "WarmRestart", "open_warm"]
