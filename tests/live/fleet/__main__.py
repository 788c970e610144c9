"""Test hosts to play with by hand: `make fleet-up`, `make fleet-down`, and in between

    PYTHONPATH=tests/live .venv/bin/python -m fleet VERB [HOST] [NUMBERS]

    up [systemd]   down   status                     cut HOST [in|out]   pull HOST   heal HOST
    on HOST   off HOST   cycle HOST                  slow HOST DELAY_SECONDS [JITTER_SECONDS [LOSS_0_TO_1]]
    sshd-down HOST   sshd-up HOST                    run HOST COMMAND …
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from fleet.hosts import Hosts, by_hand


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    verb, *rest = arguments
    if verb == "up":
        return bring_up(rest[0] if rest else "sshd")
    settled = by_hand(init_of(by_hand()))
    if verb == "down":
        settled.down()
        return 0
    if not settled.ground.folder.exists():
        print("there are no hosts: make fleet-up", file=sys.stderr)
        return 1
    if verb == "status":
        show(settled)
        return 0
    name, *values = rest
    return act(settled, verb, name, values)


def bring_up(init: str) -> int:
    hosts = by_hand(init)
    try:
        hosts.up()
    except BaseException:
        hosts.down()
        raise
    (hosts.ground.folder / "init").write_text(init, encoding="ascii")
    show(hosts)
    print(f"ssh -F {hosts.ssh_config} gx10      (or root@gx10; from host to host plain `ssh spark-a`)")
    return 0


def init_of(hosts: Hosts) -> str:
    path = hosts.ground.folder / "init"
    return path.read_text(encoding="ascii") if path.exists() else "sshd"


def show(hosts: Hosts) -> None:
    for host in hosts:
        condition = host.cable.condition
        print(f"{host.name:10} {'on' if host.is_on else 'off':4} {host.address:14} pid 1 is {host.pid or '-':<8} "
              f"cut: {condition.cut or 'no':5} pulled: {'yes' if condition.is_pulled else 'no':4} {condition.quality}")


def act(hosts: Hosts, verb: str, name: str, values: list[str]) -> int:
    host = hosts[name]
    if verb == "run":
        done = host.run(*values, check=False)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return int(done.returncode)
    numbers = [float(each) for each in values] if verb == "slow" else []
    acts: dict[str, Callable[[], None]] = {
        "on": host.power_on, "off": host.power_off, "cycle": host.power_cycle, "pull": host.pull_cable, "heal": host.heal,
        "sshd-down": host.stop_sshd, "sshd-up": host.start_sshd, "cut": lambda: host.cut(values[0] if values else "both"),  # type: ignore[arg-type]
        "slow": lambda: host.slow(numbers[0], jitter_seconds=sum(numbers[1:2]), loss=sum(numbers[2:3])),
    }
    acts[verb]()
    show(hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
