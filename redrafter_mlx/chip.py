"""The name of what computes here, for records of what was measured on it."""

from __future__ import annotations

import platform

import mlx.core as mx


def chip_name() -> str:
    """The default device's name, such as `Apple M2 Ultra`."""
    name = mx.device_info(mx.default_device()).get("device_name", platform.machine())
    return str(name)


def system_name() -> str:
    """The system beneath, such as `macOS 15.1` or `Linux x86_64`."""
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{platform.system()} {platform.machine()}"
