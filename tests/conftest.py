"""Settings that hold for every test: hypothesis without timing rules, since the machines are shared and noisy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("shared-machine")
