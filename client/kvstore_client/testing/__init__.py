"""The conformance suite of connectors, shipped so that the connector of your engine can prove itself.

    from kvstore_client.testing import ConnectorContract

    class TestMyConnector(ConnectorContract):
        engine = "my_package.kvstored_test:open_engine"

`open_engine(setting)` returns an object with `store(tokens)`, `restore(tokens)` and `close()`. Run by pytest; importing
this needs neither pytest nor an engine. It starts real daemons, so `python -m kvstored` must work. How to write a
connector, and what each case proves: docs/connectors.md.
"""

from __future__ import annotations

from kvstore_client.testing.contract import ConnectorContract
from kvstore_client.testing.daemon import DaemonProcess, eventually
from kvstore_client.testing.mock_engine import MockEngine, open_mock_engine
from kvstore_client.testing.mock_kinds import KindsEngine, open_kinds_engine
from kvstore_client.testing.process import EngineProcess
from kvstore_client.testing.setting import Engine, EngineFailed, EngineSetting, EngineUnderTest, PromptResult

__all__ = [
    "ConnectorContract",
    "DaemonProcess",
    "Engine",
    "EngineFailed",
    "EngineProcess",
    "EngineSetting",
    "EngineUnderTest",
    "KindsEngine",
    "MockEngine",
    "PromptResult",
    "eventually",
    "open_kinds_engine",
    "open_mock_engine",
]
