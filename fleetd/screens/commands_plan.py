"""Verbs around a plan: `check plan-schema launch follow`. A plan is checked here, before anything is asked of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetd.campaign import Plan
from fleetd.screens import terminal, words
from fleetd.screens.client import Client
from fleetd.screens.document import campaigns, find_campaign
from policies.errors import EXIT_OK, RequestRefused

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.yaml.")]


def add_to(app: typer.Typer) -> None:
    app.command()(check)
    app.command("plan-schema")(plan_schema)
    app.command()(launch)
    app.command()(follow)


def check(
    plan: PlanFile,
    no_hosts: Annotated[bool, typer.Option("--no-hosts", help="Only the plan: no host is looked at.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check a plan and look at its hosts as a launch would. Nothing is started; exit 3 when it can't be done now, 8 when a host is away."""
    from fleetd import clock
    from fleetd.plan import load_plan
    from fleetd.screens.host_checks import faults_of, look_at_hosts
    from fleetd.screens.plan_view import check_document, render_check

    loaded = load_plan(plan)
    looked = None if no_hosts else look_at_hosts(loaded)
    faults = faults_of(looked) if looked is not None else []
    now = clock.read().now
    if as_json:
        terminal.emit({**check_document(loaded, now, looked), "preflight": [fault.to_json() for fault in faults]})
    else:
        terminal.show(render_check(loaded, now, width=terminal.width(), looked=looked))
    terminal.complain_of(faults)
    return faults[0].exit_code if faults else EXIT_OK


def plan_schema() -> int:
    """Print the JSON schema of plan.yaml, for editors."""
    from fleetd.plan import plan_schema as schema

    terminal.emit(schema())
    return EXIT_OK


def launch(
    plan: PlanFile,
    follow_it: Annotated[bool, typer.Option("--follow", "-f", help="Stay and show the progress; Ctrl-C leaves the campaign running.")] = False,
    as_json: AsJson = False,
) -> int:
    """Launch a campaign. A coordinator is started if none runs; it goes on without this terminal."""
    from fleetd.coordinator.daemon import ensure_running
    from fleetd.plan import load_plan
    from fleetd.wire import encode

    loaded = load_plan(plan)
    found = terminal.coordinator()
    paths = found.paths
    if found.is_system:
        refuse_local(loaded.plan)
    pid, started = (None, False) if found.is_system else ensure_running(paths.root)
    with Client(paths) as client:
        pid = pid or int(client.status()["coordinator"]["pid"])  # nobody but its manager starts the machine's own
        terminal.say(f"{'started the' if started else 'using the'} coordinator, pid {pid}, state {paths.root}", talk=as_json)
        answer = client.launch(encode(loaded.plan), loaded.text, terminal.actor())
        campaign_id = str(answer["campaign_id"])
        if as_json:
            terminal.emit({**answer, "coordinator": {"pid": pid, "started": started, "state_dir": str(paths.root)}})
            return EXIT_OK
        count = words.plural(len(answer.get("runs") or []), "run")
        terminal.say(f"launched {campaign_id}: {count}{_deadline(client, campaign_id)}")
        for warning in answer.get("warnings") or []:
            terminal.say(f"  worth knowing: {warning}")
        if follow_it:
            return _follow(client, campaign_id)
    terminal.say(f"  watch:  fleetd status\n  follow: fleetd follow {campaign_id}\n  stop:   fleetd stop {campaign_id}")
    return EXIT_OK


def refuse_local(plan: Plan) -> None:
    """RequestRefused for a host that the machine's coordinator would have to reach without SSH."""
    local = next((host.name for host in plan.hosts if host.is_local), None)
    if local is not None:
        raise RequestRefused(
            "the machine's coordinator reaches its own machine through SSH too", where=f"host {local} of the plan",
            what="without it the runs would live inside the walls of its service, with no GPU in sight",
            fix=f"transport: ssh for {local}; or use a coordinator of your own: fleetd daemon start",
        )


def follow(campaign: Annotated[str, typer.Argument(metavar="CAMPAIGN")]) -> int:
    """Show a campaign until it is over. Progress, then how it ended; Ctrl-C leaves it running."""
    with terminal.connect() as client:
        return _follow(client, str(find_campaign(client.status(), campaign)["campaign_id"]))


def _follow(client: Client, campaign_id: str) -> int:
    from fleetd.screens.follow import follow_campaign

    return follow_campaign(client, campaign_id)


def _deadline(client: Client, campaign_id: str) -> str:
    """`, deadline 2026-12-01 16:20 UTC`: the absolute moment, which a duration in the plan became at launch."""
    found = next((each for each in campaigns(client.status()) if each["campaign_id"] == campaign_id), {})
    return f", deadline {words.moment(found['deadline_at'])}" if found.get("deadline_at") else ""
