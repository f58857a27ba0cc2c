"""What a benchmark says of the machine and the versions that it ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any


def machine() -> dict[str, Any]:
    """Processors, load and operating system; no name of the machine or its user."""
    return {"processors": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "platform": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of packages."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
