"""Pid 1 of a test host: `boot.py SETTINGS`, in fresh namespaces. Says its pid, waits until its cable is plugged in, builds its root, becomes init.

Standard library only, and nothing of this project: the host is a machine of its own. `host.py` writes the settings.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn

MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND, MS_REC, MS_SHARED, MNT_DETACH = 1, 2, 32, 4096, 16384, 1 << 20, 2
ETHTOOL_OFF = (0x17, 0x1F, 0x24)
"""linux/ethtool.h: ETHTOOL_STXCSUM, STSO, SGSO. A relay reads whole frames, with their checksums in them."""
SIOCETHTOOL = 0x8946
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "container": "fleetd-test-host",
}
LEGACY_ARGUMENTS = ("systemd.unified_cgroup_hierarchy=0", "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1")

_libc = ctypes.CDLL(None, use_errno=True)


def main(settings_path: str) -> None:
    # /proc is still the one of the machine outside, so this is the pid by which the outside knows us.
    os.write(1, f"{os.readlink('/proc/self')}\n".encode())
    if os.read(0, 1) != b"+":
        raise SystemExit("the cable was never plugged in")
    settings = json.loads(Path(settings_path).read_text(encoding="utf-8"))
    socket.sethostname(settings["name"])
    set_up_network(settings)
    root = Path(settings["folder"]) / "root"
    mount("overlay", root, "overlay", data=",".join(f"{key}={settings[key]}" for key in ("lowerdir", "upperdir", "workdir")))
    mount_kernel_views(root, settings)
    share(root, settings["shared"])
    mount_groups(root / "sys/fs/cgroup", settings["hierarchies"])
    enter(root)
    become_init(settings["init"], is_legacy=any(each["kind"] == "cgroup" for each in settings["hierarchies"]))


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'bind'}: {os.strerror(number)}", str(target))


def set_up_network(settings: dict[str, Any]) -> None:
    lines = ["link set lo up", f"address add {settings['address']}/24 dev eth0", "link set eth0 up"]
    if settings["address_v6"]:
        lines.insert(2, f"address add {settings['address_v6']}/64 dev eth0 nodad")
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in ETHTOOL_OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP16x", b"eth0", ctypes.addressof(value)))


def share(root: Path, folders: list[str]) -> None:
    """Folders of the machine outside that are seen here too, and can't be written here."""
    for folder in folders:
        target = root / folder.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount(folder, target, flags=MS_BIND | MS_REC)
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def mount_kernel_views(root: Path, settings: dict[str, Any]) -> None:
    """What a power-on makes new: /proc, /sys, /dev, /run, /tmp, and the boot id."""
    mount("proc", root / "proc", "proc")
    mount("sysfs", root / "sys", "sysfs", MS_RDONLY)
    mount("tmpfs", root / "dev", "tmpfs", data="mode=755")
    for name in DEVICES:
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.stat(f"/dev/{name}").st_rdev)
        os.chmod(root / "dev" / name, 0o666)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")):
        (root / "dev" / name).symlink_to(target)
    for name, kind, data in (("dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620,gid=5"), ("dev/shm", "tmpfs", "mode=1777"),
                             ("run", "tmpfs", "mode=755"), ("tmp", "tmpfs", "mode=1777")):
        (root / name).mkdir(exist_ok=True)
        mount(kind, root / name, kind, MS_NOSUID, data)
    for name in ("run/sshd", "run/lock"):
        (root / name).mkdir()
    boot_id = Path(settings["folder"]) / "boot_id"
    boot_id.unlink(missing_ok=True)
    boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    mount(str(boot_id), root / "proc/sys/kernel/random/boot_id", flags=MS_BIND)


def mount_groups(place: Path, hierarchies: list[dict[str, str]]) -> None:
    """Our own view of every hierarchy that we were put into: inside our namespace its top is this host's."""
    if any(each["place"] == "" for each in hierarchies):
        mount("cgroup2", place, "cgroup2")
        return
    mount("tmpfs", place, "tmpfs", data="mode=755")
    for each in (each for each in hierarchies if each["kind"]):
        (place / each["place"]).mkdir(parents=True, exist_ok=True)
        mount("cgroup", place / each["place"], each["kind"], data=each["options"])


def enter(root: Path) -> None:
    os.chdir(root)
    (root / ".old").mkdir(exist_ok=True)
    subprocess.run(["pivot_root", ".", ".old"], check=True)
    os.chdir("/")
    if _libc.umount2(b"/.old", MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount of the old root")
    os.rmdir("/.old")
    # As systemd does on a machine: a service manager hands credentials to a unit through a mount that has to travel.
    mount("", Path("/"), flags=MS_SHARED | MS_REC)


def become_init(init: str, *, is_legacy: bool) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if init == "systemd":
        program = "/lib/systemd/systemd"
        os.execve(program, [program, "--show-status=no", *(LEGACY_ARGUMENTS if is_legacy else ())], ENVIRONMENT)
    subprocess.run(["/usr/sbin/sshd"], env=ENVIRONMENT, check=True)
    reap_for_ever()


def reap_for_ever() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main(sys.argv[1])
