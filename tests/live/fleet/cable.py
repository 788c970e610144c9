"""The network of the test hosts: one bridge, a cable for each host, and everything that may befall a cable.

    host's eth0 ── cable ── bridge                    as it should be
    host's eth0 ── cable    bridge                    cut: no port of the bridge any more, and the host still sees its link
    host's eth0 ── cable ── relay ── tap ── bridge    slow, lossy, or cut in one direction only

What was done to a cable is kept in a file beside the host's disk: it outlives a power cycle, as a cut cable does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from fleet.ground import END_SECONDS_MAX, Ground, end_recorded, remember

TIED_TO_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""What we start ends with us, even if we are killed."""
RELAY = Path(__file__).with_name("relay.py")

Way = Literal["both", "in", "out"]
"""As the host sees it: `in` is what it would receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0
    """Of the frames, between 0 and 1. Delay and loss hold for each direction."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a cable suffers from now."""

    cut: Way | None = None
    is_pulled: bool = False
    quality: Quality = field(default_factory=Quality)

    @property
    def needs_relay(self) -> bool:
        return self.cut in ("in", "out") or self.quality != Quality(seed=self.quality.seed)


class Cable:
    def __init__(self, ground: Ground, place: int, folder: Path, *, is_tied: bool) -> None:
        self.ground, self.place, self.folder = ground, place, folder
        self.name, self.tap = ground.cable(place), ground.tap(place)
        self._process: subprocess.Popen[bytes] | None = None
        self._before = TIED_TO_US if is_tied else ("setsid",)

    @property
    def condition(self) -> Condition:
        try:
            body = json.loads((self.folder / "cable.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Condition()
        return Condition(cut=body["cut"], is_pulled=body["is_pulled"], quality=Quality(**body["quality"]))

    def change(self, condition: Condition) -> None:
        (self.folder / "cable.json").write_text(json.dumps(asdict(condition)), encoding="utf-8")
        if self.is_plugged_in():
            self._apply(condition)

    def cut(self, way: Way) -> None:
        self.change(replace(self.condition, cut=way))

    def pull(self, is_pulled: bool) -> None:
        self.change(replace(self.condition, is_pulled=is_pulled))

    def spoil(self, quality: Quality) -> None:
        self.change(replace(self.condition, quality=quality))

    def heal(self) -> None:
        """A good cable again, plugged in."""
        if self.condition != Condition():
            self.change(Condition())

    def is_plugged_in(self) -> bool:
        return Path("/sys/class/net", self.name).exists()

    def plug_in(self, pid: int) -> None:
        """Between the bridge and `eth0` in the network namespace of `pid`, in the condition that it had before."""
        ip(f"link add {self.name} type veth peer name eth0 address {self.ground.hardware_address(self.place)} netns {pid}")
        # A cable that is no port of the bridge must not answer for this machine by itself.
        if has_v6():
            Path(f"/proc/sys/net/ipv6/conf/{self.name}/disable_ipv6").write_text("1", encoding="ascii")
        ip(f"link set {self.name} arp off")
        self._apply(self.condition)

    def unplug(self) -> None:
        """As at a power cut: from one moment to the next nothing leaves the host, not even its goodbyes."""
        if self.is_plugged_in():
            ip(f"link set {self.name} down")
        self._end_relay()

    def throw_away(self) -> None:
        """The namespace at the other end takes the cable along, a moment later."""
        subprocess.run(["ip", "link", "delete", self.name], stderr=subprocess.DEVNULL, check=False)

    @property
    def _relay_record(self) -> Path:
        return self.folder / "relay.pid"

    def _apply(self, condition: Condition) -> None:
        self._end_relay()
        is_direct = condition.cut is None and not condition.needs_relay
        ip(f"link set {self.name} {f'master {self.ground.bridge}' if is_direct else 'nomaster'}")
        if condition.needs_relay and condition.cut != "both":
            self._start_relay(condition)
        ip(f"link set {self.name} {'down' if condition.is_pulled else 'up'}")

    def _end_relay(self) -> None:
        end_recorded(self._relay_record)
        if self._process is not None:
            self._process.wait(END_SECONDS_MAX)
            self._process = None

    def _start_relay(self, condition: Condition) -> None:
        quality = condition.quality
        ways = {way: {"delay_seconds": quality.delay_seconds, "jitter_seconds": quality.jitter_seconds,
                      "loss": 1.0 if condition.cut == way else quality.loss} for way in ("in", "out")}
        settings = self.folder / "relay.json"
        settings.write_text(json.dumps({"cable": self.name, "tap": self.tap, "bridge": self.ground.bridge, "seed": quality.seed, **ways}),
                            encoding="utf-8")
        with open(self.folder / "relay.log", "ab") as log:
            process = subprocess.Popen([*self._before, os.path.realpath(sys.executable), "-I", "-S", str(RELAY), str(settings)],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        with process.stdout as said:
            assert said.read(1) == b"+", (self.folder / "relay.log").read_text(encoding="utf-8")
        remember(self._relay_record, process.pid)
        self._process = process


def ip(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True)


def build_bridge(ground: Ground, has_v6: bool) -> None:
    """The bridge and this machine's own address on it. Without the bridge the hosts' addresses lead nowhere, not out by the default route."""
    ip(f"route replace unreachable {ground.subnet} metric 4096",
       f"link add {ground.bridge} address {ground.hardware_address(0)} type bridge forward_delay 0",
       f"address add {ground.address(0)}/24 dev {ground.bridge}",
       *([f"address add {ground.address_v6(0)}/64 dev {ground.bridge} nodad"] if has_v6 else []), f"link set {ground.bridge} up")


def has_v6() -> bool:
    try:
        return Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").read_text(encoding="ascii").strip() == "0"
    except FileNotFoundError:
        return False
