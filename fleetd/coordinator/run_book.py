"""The run book of displaced work: what a campaign moved away on which host, and the exact commands that bring it back, fleetd or not.

    displaced.json   everything that was shown and what became of it      displaced.md   the same for a person, every command whole

Written before anything is signalled, and again after every change. The commands are for a person's shell; fleetd itself never runs one.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.decide_displacement import told
from fleetd.coordinator.specs import host_plan
from fleetd.files import write_record, write_text
from fleetd.fleet import Campaign, Displaced
from fleetd.paths import CampaignPaths, HostPaths
from fleetd.wire import encode
from policies.displacement import description, process_words
from policies.facts import format_moment
from policies.workloads import FoundProcess


def write_run_book(paths: CampaignPaths, campaign: Campaign) -> None:
    """Both files, whole. They hold command lines of others: only this user may read them."""
    os.makedirs(paths.root, mode=0o700, exist_ok=True)
    write_record(paths.displaced, run_book(campaign))
    write_text(paths.displaced_text, run_book_text(campaign))


def run_book(campaign: Campaign) -> dict[str, Any]:
    return {
        "schema": 1, "campaign_id": campaign.campaign_id,
        "displaced": [
            {**told(item), "workload": encode(item.workload), "found": encode(item.found), "restore": restore_commands(campaign, item)}
            for item in campaign.displaced
        ],
    }


def run_book_text(campaign: Campaign) -> str:
    """Host by host, in the order in which the work comes back: the reverse of the one in which it went."""
    lines = [
        f"# Displaced work of {campaign.campaign_id}", "",
        f"`fleetd restore {campaign.campaign_id}` does all of this and recognises what runs again already. By hand: from top to bottom, each once.",
    ]
    for host in dict.fromkeys(item.host for item in campaign.displaced):
        lines += ["", f"## {host}"]
        for item in reversed([each for each in campaign.displaced if each.host == host]):
            since = format_moment(item.since)
            lines += ["", f"### {item.workload.name}: {item.state} since {since}{f': {item.detail}' if item.detail else ''}", ""]
            lines += [f"- {description(item.workload)}", *(f"- was {process_words(each)}" for each in item.found.processes)]
            lines += ["", "```sh", *restore_commands(campaign, item), "```"]
    return "\n".join([*lines, ""])


def restore_commands(campaign: Campaign, item: Displaced) -> list[str]:
    """What a person types on the coordinator's machine, one line for each process."""
    host, workload = host_plan(campaign, item.host), item.workload
    if workload.unit is not None:
        words = ["systemctl", *(["--user"] if workload.is_user_unit else []), "start", workload.unit]
        return [_there(host, shlex.join(words))]
    return [_there(host, _start_line(campaign, item, host, number, each)) for number, each in enumerate(item.found.processes)]


def _start_line(campaign: Campaign, item: Displaced, host: HostPlan, number: int, found: FoundProcess) -> str:
    """Its folder, its environment from the file that the host keeps, its own session, its output into a file."""
    restart = item.workload.restart
    assert restart is not None, "a plan that names a process says how it is started"
    place = HostPaths(Path(host.root)).displaced(campaign.campaign_id, item.workload.name)
    folder, output = restart.working_directory or found.working_directory or "/", restart.output or str(place.output)
    inner = 'cd "$1" && . "$2" && exec >>"$3" 2>&1 </dev/null && shift 3 && exec "$@"'
    words = ["env", "-i", "setsid", "-f", "sh", "-c", inner, "sh", folder, str(place.variables(number)), output, *restart.command]
    if item.found.agent_uid != found.identity.uid:
        words = ["sudo", "-u", f"#{found.identity.uid}", *words]
    return shlex.join(words)


def _there(host: HostPlan, line: str) -> str:
    """The line as it stands on this machine, or handed to the host's shell by ssh."""
    if host.is_local:
        return line
    options: list[str] = []
    for flag, value in (("-F", host.ssh_config), ("-i", host.identity_file), ("-J", host.proxy_jump), ("-l", host.user)):
        options += [flag, value] if value else []
    options += ["-p", str(host.port)] if host.port else []
    return shlex.join(["ssh", *options, host.address or host.name, line])
