"""The test hosts themselves: what a test does to them really happens, and nothing of them is left."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.cable import Way
from fleet.ground import Claim, Ground, NoNumber, clear_stale, groups_of
from fleet.host import can_connect
from fleet.hosts import PROJECT, Hosts
from fleet.install import USER_ID
from fleet.relay import Direction

WAIT_SECONDS_MAX = 90.0
SILENT_SECONDS = 0.4
"""Long enough for an answer on this wire, which needs milliseconds."""
OFF_SECONDS = 1.0


def traces(ground: Ground) -> list[str]:
    """Everything on this machine that carries the number of a fleet."""
    links = [each.name for each in Path("/sys/class/net").iterdir() if each.name == ground.bridge or each.name.startswith(f"{ground.prefix}-")]
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    groups = [str(each) for each in groups_of(ground)]
    mounts = [line for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if f"{ground.folder}/" in line]
    found = [*links, *(line for line in routes if ground.subnet in line), *groups, *mounts, *([str(ground.folder)] if ground.folder.exists() else [])]
    return found + processes_with(f"{ground.folder}/")


def processes_with(word: str) -> list[str]:
    """Command lines that hold this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in words and int(entry.name) != os.getpid():
                found.append(words)
        except OSError:
            continue
    return found


def until(met, what: str) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not (seen := met()):
        assert time.monotonic() < end, f"{what}: {seen}"
        time.sleep(0.02)


def test_each_host_is_a_machine_of_its_own(hosts: Hosts) -> None:
    say = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid; id -un"
    told = {host.name: hosts.ssh(host.name, say).stdout.split() for host in hosts}
    assert [words[0] for words in told.values()] == ["gx10", "spark-a", "spark-b"]
    own = [word for words in told.values() for word in words[1:4]]
    assert len(set(own)) == len(own) == 9
    assert {words[4] for words in told.values()} == {"fleet"}
    assert hosts["gx10"].run("ls", "-A", "/srv").stdout == "", "what this machine keeps there is no host's"
    hosts["gx10"].run("sh", "-c", "echo mine > /etc/mark")
    assert not Path("/etc/mark").exists() and hosts.ssh("spark-a", "test -e /etc/mark", check=False).returncode == 1


def test_hosts_reach_each_other_by_name_with_strict_keys(hosts: Hosts) -> None:
    strict = "ssh -o StrictHostKeyChecking=yes -o BatchMode=yes"
    assert hosts.ssh("gx10", f"{strict} spark-b hostname").stdout.strip() == "spark-b"
    assert hosts.ssh("spark-a", f"{strict} root@gx10 hostname", user="root").stdout.strip() == "gx10"


def test_the_project_can_be_read_on_a_host_and_not_be_changed(hosts: Hosts) -> None:
    say = "import fleetd, psutil, sys; print(fleetd.__file__)"
    assert hosts["gx10"].run(sys.executable, "-c", say).stdout.strip() == str(PROJECT / "fleetd" / "__init__.py")
    if str(PROJECT).startswith("/tmp/"):
        assert hosts["gx10"].run("touch", str(PROJECT / "stray"), check=False).returncode != 0
    hosts["gx10"].run("sh", "-c", "touch /usr/stray /etc/stray")
    assert not Path("/usr/stray").exists() and not Path("/etc/stray").exists()


def test_a_power_cycle_ends_everything_and_gives_a_new_boot_id(hosts: Hosts) -> None:
    host, other = hosts["spark-a"], hosts["spark-b"]
    before = host.boot_id
    hosts.ssh("spark-a", "echo kept > /srv/kept; echo gone > /tmp/gone; setsid -f sleep 12345 < /dev/null > /dev/null 2>&1")
    living = host.processes()
    assert len(living) >= 2
    other_life = other.pid
    host.power_off()
    assert not host.is_on and not [pid for pid in living if Path(f"/proc/{pid}").exists()]
    assert not can_connect(host.address, seconds=OFF_SECONDS) and can_connect(other.address)
    host.power_on()
    assert host.boot_id != before == before
    told = hosts.ssh("spark-a", "cat /proc/sys/kernel/random/boot_id /srv/kept; ls -d /tmp/gone; pgrep -c sleep", check=False).stdout.split()
    assert told == [host.boot_id, "kept", "0"]
    assert other.pid == other_life


def test_a_cut_is_silent_and_an_open_connection_goes_on_after_it(hosts: Hosts) -> None:
    host = hosts["spark-a"]
    with talk(hosts, "spark-a") as talker:
        assert answer(talker, "one") == "one"
        host.cut()
        assert not can_connect(host.address, seconds=SILENT_SECONDS), "a new connection gets no answer at all"
        assert (host.path("/sys/class/net/eth0/carrier")).read_text(encoding="ascii").strip() == "1"
        assert can_connect(hosts["spark-b"].address)
        tried = hosts.ssh("spark-b", "timeout 1 bash -c 'exec 3<> /dev/tcp/spark-a/22'", check=False)
        assert tried.returncode == 124 or "No route to host" in tried.stderr, "nobody refused it"  # three seconds of silence are no route
        say(talker, "two")
        assert not is_said(talker, SILENT_SECONDS)
        host.heal()
        assert read_line(talker) == "two"


COUNT = """
import select, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 999)); count = 0
print("ready", flush=True)
while s in select.select([s, sys.stdin], [], [])[0]:
    if s.recv(9) == b"end": break
    count += 1
print(count)
"""


def heard(hosts: Hosts, name: str, sent: int, patience_seconds: float = WAIT_SECONDS_MAX) -> int:
    """How many of so many datagrams a host hears. Its hardware address is given, since an answer to who-has might be lost too. Frames keep
    their order, so it counts until it hears that this was all, or until nobody is patient any more."""
    host, bridge = hosts[name], hosts.ground.bridge
    hardware = host.path("/sys/class/net/eth0/address").read_text(encoding="ascii").strip()
    subprocess.run(["ip", "neigh", "replace", host.address, "lladdr", hardware, "dev", bridge], check=True)
    with subprocess.Popen([*host.inside(), "python3", "-c", COUNT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdin is not None and listener.stdout is not None and listener.stdout.readline() == "ready\n"
        end = time.monotonic() + patience_seconds
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(sent):
                sender.sendto(b"hello", (host.address, 999))
                time.sleep(0.001)
            while not is_said(listener, 0.02) and time.monotonic() < end:
                sender.sendto(b"end", (host.address, 999))
        listener.stdin.close()
        count = int(listener.stdout.readline())
    subprocess.run(["ip", "neigh", "del", host.address, "dev", bridge], check=True)
    return count


@pytest.mark.parametrize(("way", "count", "patience_seconds"), [("in", 0, SILENT_SECONDS), ("out", 20, WAIT_SECONDS_MAX)])
def test_a_cut_in_one_direction_lets_the_other_through(hosts: Hosts, way: Way, count: int, patience_seconds: float) -> None:
    hosts["spark-b"].cut(way)
    assert not can_connect(hosts["spark-b"].address, seconds=SILENT_SECONDS)
    assert heard(hosts, "spark-b", 20, patience_seconds) == count


def test_a_slow_cable_delays_both_ways(hosts: Hosts) -> None:
    host = hosts["spark-b"]
    host.slow(0.15)
    assert seconds_to_connect(host.address) >= 0.3


def test_a_lossy_cable_loses_some_frames_and_ssh_gets_through(hosts: Hosts) -> None:
    assert heard(hosts, "spark-b", 200) == 200
    hosts["spark-b"].slow(loss=0.1, seed=7)
    assert 150 < heard(hosts, "spark-b", 200) < 200
    assert hosts.ssh("spark-b", "head -c 20000 /dev/zero | wc -c").stdout.strip() == "20000"


def test_what_a_lossy_cable_loses_depends_on_its_seed_alone() -> None:
    first, same, other = (Direction({"delay_seconds": 0.1, "jitter_seconds": 0.05, "loss": 0.5}, seed) for seed in ("1", "1", "2"))
    moments = [count / 1000 for count in range(50)]
    left = [first.leaves_at(now) for now in moments]
    assert left == [same.leaves_at(now) for now in moments] != [other.leaves_at(now) for now in moments]
    kept = [at for at in left if at is not None]
    assert 10 < len(kept) < 40 and kept == sorted(kept), "frames keep their order, whatever the jitter"


def test_a_cable_stays_as_it_is_over_a_power_cycle(hosts: Hosts) -> None:
    host = hosts["spark-a"]
    host.cut()
    host.power_cycle()
    assert not can_connect(host.address, seconds=SILENT_SECONDS)
    host.pull_cable()
    state = host.path("/sys/class/net/eth0/operstate")
    until(lambda: state.read_text(encoding="ascii").strip() != "up", "its link is down")  # the kernel tells of it at most once a second
    host.heal()
    assert can_connect(host.address)
    host.slow(0.1)
    host.power_cycle()
    assert seconds_to_connect(host.address) >= 0.2


def test_without_its_sshd_a_host_refuses_at_once_and_open_connections_go_on(hosts: Hosts) -> None:
    host = hosts["gx10"]
    with talk(hosts, "gx10") as talker:
        assert answer(talker, "one") == "one"
        host.stop_sshd()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host.address, 22), timeout=WAIT_SECONDS_MAX)
        assert answer(talker, "two") == "two"
        host.start_sshd()
        assert can_connect(host.address)


def test_a_test_leaves_the_hosts_as_it_found_them(hosts: Hosts) -> None:
    hosts.ssh("spark-a", "echo x > /srv/x; setsid -f sleep 12345 < /dev/null > /dev/null 2>&1")
    hosts["spark-b"].power_off()
    hosts["gx10"].cut()
    hosts["gx10"].stop_sshd()
    quiet = hosts["gx10"].pid
    hosts.restore()
    assert [hosts.ssh(host.name, "ls /srv; pgrep -c sleep", check=False).stdout.split() for host in hosts] == [["0"]] * 3
    assert hosts["gx10"].pid == quiet, "a host on which nothing was left is not switched off for it"


MAKE_AND_WAIT = """
import sys, time
from fleet.hosts import Hosts
with Hosts(["gx10", "spark-a"]) as hosts:
    hosts["gx10"].slow(0.01)
    hosts.ssh("gx10", "setsid -f sleep 12345 < /dev/null > /dev/null 2>&1")
    print(hosts.ground.number, flush=True)
    {then}
"""


def another(then: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "tests" / "live")}
    argv = [sys.executable, "-c", MAKE_AND_WAIT.format(then=then)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_nothing_is_left_of_hosts_whose_test_failed() -> None:
    with another("raise AssertionError('the test failed')") as owner:
        told, complaint = owner.communicate(timeout=200)
    assert "the test failed" in complaint and "taken away" not in complaint
    assert traces(Ground(int(told))) == []


def test_hosts_end_with_an_owner_that_is_killed_and_the_next_one_clears_up() -> None:
    with another("time.sleep(600)") as owner:
        assert owner.stdout is not None
        ground = Ground(int(owner.stdout.readline()))
        assert len(processes_with(f"{ground.folder}/")) >= 3
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    until(lambda: not processes_with(f"{ground.folder}/"), "hosts outlive the process that made them")
    assert ground.folder.exists()
    clear_stale()
    until(lambda: not traces(ground), "something is left")


def test_two_owners_never_get_the_same_number(hosts: Hosts) -> None:
    claim = Claim()
    try:
        assert claim.ground != hosts.ground
        with pytest.raises(NoNumber):
            Claim([hosts.ground.number])
        clear_stale()
        assert all(host.is_on for host in hosts), "what somebody has claimed is not stale"
    finally:
        claim.leave()


LOOPBACK = """
import json, os
from fleet.loopback import LoopbackHosts
with LoopbackHosts() as hosts:
    host = hosts["spark-a"]
    said = hosts.ssh("spark-a", "hostname; pwd; cat /proc/sys/kernel/random/boot_id; setsid -f sleep 4321 < /dev/null > /dev/null 2>&1")
    said = said.stdout.split()
    before = host.boot_id
    host.power_cycle()
    count = hosts.ssh("spark-a", "pgrep -c -f '^sleep 4321'", check=False).stdout.strip()
    home = [str(each.home) for each in hosts]
    print(json.dumps([os.getuid(), hosts.is_isolated, said, before, host.boot_id, count, home, str(hosts.folder)]))
"""


@pytest.fixture
def as_a_user(hosts: Hosts) -> Iterator[list[str]]:
    """The beginning of a command that runs on this machine as an ordinary user, with this package on its path and nothing else of ours."""
    folder = Path(tempfile.mkdtemp(prefix="fleetd-user-"))
    folder.chmod(0o755)
    shutil.copytree(Path(__file__).parent, folder / "fleet", ignore=shutil.ignore_patterns("test_*", "conftest.py", "__pycache__"))
    passwd = hosts["gx10"].folder / "upper/etc/passwd"
    become = f"mount --bind {passwd} /etc/passwd && exec setpriv --reuid={USER_ID} --regid={USER_ID} --clear-groups -- \"$@\""
    plain = ["env", "-i", f"PATH={os.defpath}", "SHELL=/bin/bash", f"PYTHONPATH={folder}", "PYTHONDONTWRITEBYTECODE=1"]
    yield ["unshare", "--mount", "sh", "-c", become, "become", *plain]
    shutil.rmtree(folder)


def test_hosts_without_root_have_homes_names_and_power_too(as_a_user: list[str]) -> None:
    done = subprocess.run([*as_a_user, "/usr/bin/python3", "-c", LOOPBACK], cwd="/", capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    user_id, is_isolated, said, before, after, left, homes, folder = json.loads(done.stdout)
    assert user_id == USER_ID and is_isolated
    assert said == ["spark-a", homes[1], before]
    assert after != before and left == "0"
    assert not Path(folder).exists()
    assert not processes_with(folder)


# A line there and back over an open connection.


def talk(hosts: Hosts, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["ssh", "-F", str(hosts.ssh_config), name, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def say(talker: subprocess.Popen[str], text: str) -> None:
    assert talker.stdin is not None
    talker.stdin.write(f"{text}\n")
    talker.stdin.flush()


def is_said(talker: subprocess.Popen[str], seconds: float) -> bool:
    return bool(select.select([talker.stdout], [], [], seconds)[0])


def read_line(talker: subprocess.Popen[str]) -> str:
    assert talker.stdout is not None
    assert is_said(talker, WAIT_SECONDS_MAX)
    return talker.stdout.readline().strip()


def answer(talker: subprocess.Popen[str], text: str) -> str:
    say(talker, text)
    return read_line(talker)


def seconds_to_connect(address: str) -> float:
    """At the least two ways through the cable. Only lower bounds may be asserted where this machine is busy."""
    began = time.monotonic()
    assert can_connect(address)
    return time.monotonic() - began
