"""The configuration: reference.toml says what there is, schema.py its shape, parse.py how a file becomes one."""

from kvstored.config.parse import load_config, reference_text
from kvstored.config.schema import Config, ConfigError, TenantSection, Written

__all__ = ["Config", "ConfigError", "TenantSection", "Written", "load_config", "reference_text"]
