"""What the coordinator tells the service manager that started it, by the protocol of sd_notify(3): ready, alive, leaving. Nobody else speaks it.

    READY=1     once a request on our own socket was answered        WATCHDOG=1   from the loop itself, at the end of each tick
    STATUS=…    what it watches, when that changes                   STOPPING=1   when the loop has ended
Without a service manager every call does nothing.
"""

from __future__ import annotations

import os
import socket

from fleetd import logs

ENV_SOCKET = "NOTIFY_SOCKET"
ENV_OF_OTHERS = (ENV_SOCKET, "WATCHDOG_USEC", "WATCHDOG_PID")
"""Taken out of our environment: an agent or a trainer must not speak for this service."""
SEND_SECONDS_MAX = 1.0


class ServiceManager:
    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._status = ""

    @classmethod
    def from_environment(cls) -> ServiceManager:
        address = os.environ.get(ENV_SOCKET)
        for name in ENV_OF_OTHERS:
            os.environ.pop(name, None)
        return cls(address)

    @property
    def is_there(self) -> bool:
        return bool(self._address)

    def ready(self) -> None:
        self._tell(f"READY=1\nMAINPID={os.getpid()}")

    def ticked(self, status: str) -> None:
        """The loop has come round. This alone feeds the watchdog: a thread of its own would go on when the loop hangs."""
        if status != self._status:
            self._status = status
            self._tell(f"STATUS={status}\nWATCHDOG=1")
        else:
            self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=leaving; every run goes on")

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.settimeout(SEND_SECONDS_MAX)
                manager.sendto(text.encode(), self._address)
        except OSError as fault:  # it will see for itself; no run depends on it
            logs.failed("service_manager_deaf", because=fault)
