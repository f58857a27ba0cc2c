"""Where Prometheus can scrape a running job: HTTP on the loopback interface.

Comes in: metric families. Goes out: their text, to whoever asks on this machine. Must not listen anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from dpllm.errors import ConfigError
from dpllm.telemetry.metrics import Families

LOOPBACK = "127.0.0.1"


class Endpoint:
    """An HTTP server in a thread of its own, which ends with the process at the latest."""

    def __init__(self, port: int) -> None:
        """Starts to listen; there is nothing to see before ``show``.

        Raises:
            ConfigError: The port is taken, or not permitted.
        """
        self._families, registry = Families(), CollectorRegistry()
        registry.register(self._families)
        try:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.port {port}: cannot be listened on ({error.strerror}), so Prometheus would scrape something else or "
                "nothing. Set another port, or null."
            ) from None

    def show(self, families: Iterable[Metric]) -> None:
        """Replaces what is shown."""
        self._families.now = tuple(families)

    def close(self) -> None:
        """Stops listening."""
        server: Any = self._server
        server.shutdown()
        server.server_close()
        self._thread.join(timeout=5)
