"""Which coordinator a command talks to: the one that was named, else the user's own, else the machine's; and the word that says which.

    $FLEETD_STATE or --state      that one, whatever else runs
    ~/.local/state/fleetd         when somebody answers there
    /var/lib/fleetd               when somebody answers there (a system service)
    ~/.local/state/fleetd         else: the complaint names the place where one would be started
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from fleetd.paths import SYSTEM_STATE, StatePaths, state_root

CONNECT_SECONDS_MAX = 3.0
SOCKET_PATH_BYTES_MAX = 100
"""sun_path of unix(7) holds 108 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    paths: StatePaths
    is_system: bool = False
    note: str = ""
    """For a person, on stderr; empty where there is nothing to tell apart."""


def find(system_state: Path = SYSTEM_STATE) -> Found:
    own, system = StatePaths(state_root()), StatePaths(system_state)
    if os.environ.get("FLEETD_STATE") or own.root == system.root:
        return Found(paths=own, is_system=own.root == system.root)
    system_listens = listens(system.socket)
    if listens(own.socket):
        note = f"this is your own coordinator, {own.root}; the machine's is reached by --state {system.root}" if system_listens else ""
        return Found(paths=own, note=note)
    if system_listens:
        return Found(paths=system, is_system=True, note=f"this is the machine's coordinator, {system.root}")
    if system_listens is None and not own.socket.exists():
        return Found(paths=system, is_system=True, note=f"the machine's coordinator, {system.root}, is not open to you")
    return Found(paths=own)


def listens(path: Path) -> bool | None:
    """Whether somebody takes connections at this socket; None when this user may not ask."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(CONNECT_SECONDS_MAX)
        try:
            asked.connect(str(path))
        except PermissionError:
            return None
        except TimeoutError:
            return True  # it is there, and busy
        except OSError:
            # Nobody, or a path longer than an address can hold: that one is asked through its folder.
            return _listens_through_folder(path) if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX else False
    return True


def _listens_through_folder(path: Path) -> bool:
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return bool(listens(Path(f"/proc/self/fd/{folder}") / path.name))
    finally:
        os.close(folder)
