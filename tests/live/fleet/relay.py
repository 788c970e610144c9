"""A cable with a delay and with losses: `relay.py SETTINGS`, between a host's cable and a tap device that stands in for it on the bridge.

The kernel has netem for this, but not every kernel; and here the losses come from a seed, so that a bad afternoon can be had again.
Frames keep their order in each direction. The tap goes with this process; `cable.py` plugs the cable back in.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
ETH_P_ALL = 3
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 263, 1, 1
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 8 << 20
FRAME_BYTES_MAX = 65600
FRAMES_PER_TURN_MAX = 256


class Direction:
    """One way through the cable: what it does to a frame, and when the last one leaves."""

    def __init__(self, settings: dict[str, float], seed: str) -> None:
        self.delay_seconds, self.jitter_seconds, self.loss = settings["delay_seconds"], settings["jitter_seconds"], settings["loss"]
        self._dice = random.Random(seed)
        self._last_at = 0.0

    def leaves_at(self, now: float) -> float | None:
        """When a frame that comes now leaves again; None when it is lost."""
        if self._dice.random() < self.loss:
            return None
        wait = self.delay_seconds + self._dice.uniform(-self.jitter_seconds, self.jitter_seconds)
        self._last_at = max(self._last_at, now + max(0.0, wait))
        return self._last_at


def main(settings_path: str) -> None:
    settings: dict[str, Any] = json.loads(Path(settings_path).read_text(encoding="utf-8"))
    cable, tap = open_cable(settings["cable"]), open_tap(settings["tap"])
    subprocess.run(["ip", "link", "set", settings["tap"], "master", settings["bridge"], "up"], check=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.write(1, b"+")
    carry(cable, tap, Direction(settings["out"], f"{settings['seed']} out"), Direction(settings["in"], f"{settings['seed']} in"))


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def open_cable(name: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    found.bind((name, ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, struct.pack("IHH8x", socket.if_nametoindex(name), PACKET_MR_PROMISC, 0))
    found.setblocking(False)
    return found


def carry(cable: socket.socket, tap: int, outward: Direction, inward: Direction) -> None:
    """Outward is from the host into the network."""
    waiting: list[tuple[float, int, bool, bytes]] = []
    count = itertools.count()
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([cable, tap], [], [], wait)[0]
        now = time.monotonic()
        frames = [(True, each) for each in (from_cable(cable) if cable in ready else ())]
        frames += [(False, each) for each in (from_tap(tap) if tap in ready else ())]
        for is_outward, frame in frames:
            at = (outward if is_outward else inward).leaves_at(now)
            if at is not None:
                heapq.heappush(waiting, (at, next(count), is_outward, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, is_outward, frame = heapq.heappop(waiting)
            try:
                os.write(tap, frame) if is_outward else cable.send(frame)
            except OSError:
                pass  # a link that is down or full loses frames: that is what it does


def from_cable(cable: socket.socket) -> list[bytes]:
    found = []
    for _ in range(FRAMES_PER_TURN_MAX):
        try:
            frame, sender = cable.recvfrom(FRAME_BYTES_MAX)
        except OSError:
            break
        if sender[2] != socket.PACKET_OUTGOING:
            found.append(frame)
    return found


def from_tap(tap: int) -> list[bytes]:
    found = []
    for _ in range(FRAMES_PER_TURN_MAX):
        try:
            found.append(os.read(tap, FRAME_BYTES_MAX))
        except OSError:
            break
    return found


if __name__ == "__main__":
    main(sys.argv[1])
