"""The configuration: reference.toml has every setting, schema.py the dataclasses, parse.py reads a file; tiers/ has a
file for each kind of tier.
"""

from kvstored.config.documents import reference_text
from kvstored.config.mistakes import ConfigError
from kvstored.config.parse import load_config, with_orders
from kvstored.config.schema import Config, ConfiguredSetting, TenantSection

__all__ = [
    "Config", "ConfigError", "ConfiguredSetting", "TenantSection", "load_config", "reference_text", "with_orders",
]  # fmt: skip
