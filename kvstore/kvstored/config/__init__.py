"""The configuration: reference.toml says what there is, schema.py its shape, parse.py how a file becomes one; tiers/
has a file for each kind of tier."""

from kvstored.config.documents import reference_text
from kvstored.config.mistakes import ConfigError
from kvstored.config.parse import load_config
from kvstored.config.schema import Config, TenantSection, WrittenSetting

__all__ = ["Config", "ConfigError", "TenantSection", "WrittenSetting", "load_config", "reference_text"]
