"""How quick a tree is staged: ours, rsync and scp bring the same bytes over one sshd, in turns: `python benchmarks/staging.py --write`.

Every way begins with nothing: its own connection, an empty destination. What a tool does beyond bringing bytes stands beside its figure:
ours hashes every byte as it arrives, syncs it to the disk and renames; the others do none of that unless asked.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "live"))

from sshd import Sshd  # noqa: E402  (the live tests' own host, found by its path)

from fleetd.campaign import HostPlan  # noqa: E402
from fleetd.coordinator.couriers import TreeKind  # noqa: E402
from fleetd.coordinator.deliveries import Deliveries, Delivery  # noqa: E402
from fleetd.coordinator.releases import Releases  # noqa: E402
from fleetd.coordinator.ssh_session import SshSession  # noqa: E402
from fleetd.coordinator.trees import read_entry  # noqa: E402
from fleetd.files import files_below  # noqa: E402
from fleetd.model import Owner  # noqa: E402
from fleetd.paths import StatePaths  # noqa: E402
from fleetd.wire import PROTOCOL  # noqa: E402
from policies.facts import MIB  # noqa: E402
from policies.manifest import directory_digest  # noqa: E402

FILES = 4
PRIORITY = -10
"""On a shared machine all ways get a processor when they ask for one, where this user may."""
CHUNK_BYTES = 16 * MIB
TABLE = ROOT / "benchmarks" / "README.md"
START, END = "<!-- table of benchmarks/staging.py -->", "<!-- end of staging -->"
SFTP = next((each for each in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
             if Path(each).exists()), "sftp-server")
QUICK = ("-c", "aes128-gcm@openssh.com")


class Timed(Deliveries):
    """When the one delivery began to move and when its last byte was sent."""

    began_at = sent_at = 0.0

    @contextmanager
    def under_way(self, host: str, kind: str, digest: str, bytes_total: int) -> Iterator[Delivery]:
        with super().under_way(host, kind, digest, bytes_total) as delivery:
            begins, settles = delivery.begins, delivery.settles

            def begin(bytes_there: int) -> None:
                self.began_at = time.monotonic()
                begins(bytes_there)

            def settle() -> None:
                self.sent_at = time.monotonic()
                settles()

            delivery.begins, delivery.settles = begin, settle  # type: ignore[method-assign]
            yield delivery


@dataclass
class Place:
    """One host, one source, and ours on its way there."""

    host: Sshd
    source: Path
    session: SshSession
    timed: Timed
    target: Path
    digest: str
    bring: Callable[[], bool]


@contextmanager
def place_for(folder: Path, megabytes: int) -> Iterator[Place]:
    host = Sshd(folder / "host", "spark-a", options=(f"Subsystem sftp {SFTP}",))
    source, timed = folder / "source", Timed()
    source.mkdir()
    for number in range(FILES):
        with open(source / f"shard-{number}.bin", "wb") as file:
            for _ in range(0, megabytes * MIB // FILES, CHUNK_BYTES):
                file.write(os.urandom(min(CHUNK_BYTES, megabytes * MIB // FILES)))
    entries = tuple(read_entry(source, name) for name in files_below(source))
    digest = directory_digest(entries)
    plan = HostPlan(name="spark-a", transport="ssh", ssh_config=str(host.ssh_config), root=str(host.root))
    releases = Releases(StatePaths(folder / "state"))
    session = SshSession(plan, Owner(coordinator_id="bench", generation=1), stage=releases.stage, deliveries=timed)
    try:
        session.call("hello", {"protocol": PROTOCOL}, 60.0)
        yield Place(
            host=host, source=source, session=session, timed=timed, target=host.home / "target", digest=digest,
            bring=lambda: session.courier.put_tree(TreeKind.DATASETS, digest, source, entries),
        )
    finally:
        session.close()
        host.stop()


def ours(place: Place) -> dict[str, float]:
    began_at = time.monotonic()
    assert place.bring()
    ended_at = time.monotonic()
    shutil.rmtree(place.host.root / "datasets" / place.digest)
    return {"seconds": ended_at - began_at, "sending": place.timed.sent_at - place.timed.began_at, "settling": ended_at - place.timed.sent_at}


def by_command(*argv: str) -> Callable[[Place], dict[str, float]]:
    """`{config}`, `{source}` and `{target}` are put in."""

    def run(place: Place) -> dict[str, float]:
        words = {"{config}": str(place.host.ssh_config), "{target}": str(place.target), "{source}": str(place.source)}
        command = list(argv)
        for word, meaning in words.items():
            command = [part.replace(word, meaning) for part in command]
        began_at = time.monotonic()
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        seconds = time.monotonic() - began_at
        shutil.rmtree(place.target)
        return {"seconds": seconds}

    return run


def ways(rsync: str | None) -> dict[str, Callable[[Place], dict[str, float]]]:
    found: dict[str, Callable[[Place], dict[str, float]]] = {"ours": ours}
    for name, cipher in (("", ()), (" -c aes128-gcm", QUICK)):
        if rsync is not None:
            shell = " ".join(("ssh -F {config}", *cipher))
            found[f"rsync -a{name}"] = by_command(rsync, "-a", f"--rsync-path={rsync}", "-e", shell, "{source}/", "spark-a:{target}")
        found[f"scp -r{name}"] = by_command("scp", "-q", "-r", *cipher, "-F", "{config}", "{source}", "spark-a:{target}")
    if rsync is not None:
        found["rsync -a --fsync"] = by_command(
            rsync, "-a", "--fsync", f"--rsync-path={rsync}", "-e", "ssh -F {config}", "{source}/", "spark-a:{target}",
        )
        same = f"{rsync} -a --fsync --rsync-path={rsync} -e 'ssh -F {{config}}' {{source}}/ spark-a:{{target}}"
        found["rsync -a --fsync, then sha256sum there"] = by_command(
            "sh", "-c", f"{same} && ssh -F {{config}} spark-a 'sha256sum {{target}}/*' > /dev/null",
        )
    return found


def measure(megabytes: int, rounds: int, rsync: str | None, only: list[str] | None = None) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder, place_for(Path(folder), megabytes) as place:
        turns = [(name, way) for name, way in ways(rsync).items() if not only or name in only or name == "ours"]
        for number in range(rounds + 1):
            for name, way in turns[number % len(turns):] + turns[: number % len(turns)]:
                os.sync()  # what an earlier turn has left in memory is not this one's to write
                seen = way(place)
                print(f"round {number} {name}: " + ", ".join(f"{key} {value:.2f} s" for key, value in seen.items()), file=sys.stderr, flush=True)
                if number:  # the first round warms caches up
                    found.setdefault(name, []).append(seen)
    return found


def table_of(found: dict[str, list[dict[str, float]]], megabytes: int) -> str:
    median = {name: statistics.median(each["seconds"] for each in seen) for name, seen in found.items()}
    ours_seconds, quickest = median["ours"], min((name for name in median if name in ("rsync -a", "scp -r")), key=lambda name: median[name])
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    parts = {key: statistics.median(each[key] for each in found["ours"]) for key in ("sending", "settling")}
    rest = ours_seconds - parts["sending"] - parts["settling"]
    lines = [
        f"Measured {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC on {os.cpu_count()} cores ({platform.machine()}), Linux {platform.release()}, "
        f"Python {platform.python_version()}; load average at the end {load}; all of it at nice {os.getpriority(os.PRIO_PROCESS, 0)}. "
        f"{megabytes} MiB in {FILES} files over an sshd on loopback, "
        f"{len(found['ours'])} rounds in turns after one that does not count; both ends share the processors and the disk.", "",
        "| way | median | extremes | MiB/s | ours is so many times as quick |", "|---|---|---|---|---|",
    ]
    for name, seen in found.items():
        seconds = [each["seconds"] for each in seen]
        ratio = f"{median[name] / ours_seconds:.2f}" if name != "ours" else ""
        lines.append(f"| {name} | {median[name]:.2f} s | {min(seconds):.2f} to {max(seconds):.2f} s | {megabytes / median[name]:.0f} | {ratio} |")
    lines += [
        "", f"Of ours {parts['sending']:.2f} s are the sending, every byte hashed by the receiver as it arrives, and "
        f"{parts['settling']:.2f} s what follows: waiting for the disk, rename; {rest:.2f} s the connection, login, the start of Python "
        f"and the look at what is there. Against the quicker of `rsync -a` and `scp -r` as they come ({quickest}) ours is "
        f"{median[quickest] / ours_seconds:.2f} times as quick.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rsync", default=shutil.which("rsync"), help="the rsync to use on both ends")
    parser.add_argument("--only", action="append", help="beside ours only this way, such as 'scp -r'; may be given again")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    given = parser.parse_args()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)  # both ends and every way inherit it
    text = table_of(measure(given.megabytes, given.rounds, given.rsync, given.only), given.megabytes)
    print(text)
    if given.write:
        before, _, rest = TABLE.read_text(encoding="utf-8").partition(START)
        TABLE.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
