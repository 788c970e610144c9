"""What is on a host's disk before its first start: the writable layer over this machine's own `/`.

A host has its own name, machine id, host key and users; `root` and the ordinary user `fleet` let themselves in with one key, from outside
and from any other host. The rest of `/` is this machine's, so the project's packages need no second installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

USER, USER_ID = "fleet", 1500
LOWER = Path("/")
UNITS = Path("/lib/systemd/system")

SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM {pam}
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 200
MaxSessions 100
Subsystem sftp internal-sftp
"""

SYSTEMD_OWN = {
    "sysinit.target.wants": ("systemd-journald.service", "systemd-tmpfiles-setup.service"),
    "sockets.target.wants": ("dbus.socket", "systemd-journald.socket", "systemd-journald-dev-log.socket"),
    "multi-user.target.wants": ("dbus.service", "systemd-logind.service", "systemd-user-sessions.service", "ssh.service"),
    "timers.target.wants": (),
    "local-fs.target.wants": (),
    "graphical.target.wants": (),
}
"""All that a host with systemd starts. This machine's own lists are hidden: they would start its own services a second time."""
MASKED = ("systemd-remount-fs.service", "systemd-networkd.service", "systemd-timesyncd.service", "modprobe@drm.service", "tmp.mount", "getty.target")


PRIVATE = ("root/.local/state/fleetd", "root/.config/fleetd", "root/.config/systemd", "var/lib/fleetd")
"""What a person may have of fleetd on this machine. A host must not take it for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What every host knows of the others: `/etc/hosts`, their keys as known_hosts lines, and the key that opens them."""

    hosts_file: str
    known_hosts: str
    key: Path


def make_key(path: Path, comment: str) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)


def host_key(upper: Path) -> Path:
    return upper / "etc/ssh/ssh_host_ed25519_key"


def install(upper: Path, name: str, neighbours: Neighbours, init: str) -> None:
    """Write the layer. Its host key is there already, since all hosts are told all keys."""
    etc = upper / "etc"
    (etc / "ssh").mkdir(parents=True, exist_ok=True)
    texts = {
        "hostname": f"{name}\n", "hosts": neighbours.hosts_file, "machine-id": f"{uuid.uuid4().hex}\n", "resolv.conf": "", "fstab": "",
        "ssh/sshd_config": SSHD.format(pam="yes" if init == "systemd" else "no"), "ssh/ssh_known_hosts": neighbours.known_hosts,
    }
    for path, text in texts.items():
        (etc / path).write_text(text, encoding="utf-8")
    add_user(etc)
    for home, user_id in ((upper / "root", 0), (upper / "home" / USER, USER_ID)):
        let_in(home, user_id, neighbours.key)
    os.chown(opaque(upper / "srv"), USER_ID, USER_ID)
    for place in PRIVATE:
        if (LOWER / place).exists():
            opaque(upper / place)
    if init == "systemd":
        install_systemd(upper)


def add_user(etc: Path) -> None:
    lines = {
        "passwd": f"{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:/bin/bash", "group": f"{USER}:x:{USER_ID}:", "shadow": f"{USER}:*:19000:0:99999:7:::",
    }
    for name, line in lines.items():
        original = LOWER / "etc" / name
        others = [each for each in original.read_text(encoding="utf-8").splitlines() if not each.startswith(f"{USER}:")]
        (etc / name).write_text("\n".join([*others, line, ""]), encoding="utf-8")
        shutil.copystat(original, etc / name)
        os.chown(etc / name, original.stat().st_uid, original.stat().st_gid)


def let_in(home: Path, user_id: int, key: Path) -> None:
    folder = opaque(home / ".ssh")
    shutil.copy(key, folder / "id_ed25519")
    shutil.copy(f"{key}.pub", folder / "authorized_keys")
    # A Python of root may lie in its home, and `fleet` runs it too: the home is closed to looks but not to passing through.
    for path, mode in ((home, 0o711), (folder, 0o700), (folder / "id_ed25519", 0o600), (folder / "authorized_keys", 0o600)):
        os.chmod(path, mode)
        os.chown(path, user_id, user_id)


def install_systemd(upper: Path) -> None:
    """Only what SYSTEMD_OWN names is started, and the user may linger or not as a test likes."""
    own = opaque(upper / "etc/systemd/system")
    for folder, units in SYSTEMD_OWN.items():
        hidden = opaque(upper / str(UNITS.resolve()).lstrip("/") / folder)
        for unit in units:
            if (UNITS / unit).exists():
                (hidden / unit).symlink_to(f"../{unit}")
    for unit in MASKED:
        (own / unit).symlink_to("/dev/null")
    (own / "default.target").symlink_to(UNITS / "multi-user.target")
    (own / "dbus-org.freedesktop.login1.service").symlink_to(UNITS / "systemd-logind.service")
    opaque(upper / "var/lib/systemd/linger")
    (upper / "var/log/journal").mkdir(parents=True)


def opaque(folder: Path) -> Path:
    """A folder that hides what the layer below has at its place (Documentation/filesystems/overlayfs.rst)."""
    folder.mkdir(parents=True)
    os.setxattr(folder, "trusted.overlay.opaque", b"y")
    return folder
