"""Runs of which history does not know where they are, because the part that placed them was lost. Pure.

    a host tells of one     its placing is taken over, whatever the campaign's stage and whatever people asked of it meanwhile
    a host is still silent  it may have the run: no other host is given it
    that host is fenced     the run counts as left behind there, as those that history knows to be there; where others may have it as well, only
                            once each of them has said that it does not, or was fenced too

Without this a second host would start the same run, and a stop would reach nobody.
"""

from __future__ import annotations

from fleetd.campaign import HostPlan
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Sight
from fleetd.coordinator.specs import candidate_of
from fleetd.coordinator.targets import training_stage
from fleetd.fleet import Campaign, Fleet, Run
from fleetd.model import RunReport
from fleetd.wire import encode
from policies.facts import CampaignStage, RunKind, RunState, format_moment


def is_unplaced(run: Run) -> bool:
    """Whether no host was ever given this run, as far as history knows."""
    return run.host is None and run.state in (RunState.QUEUED, RunState.STOPPED) and not run.left_behind


def options(campaign: Campaign, run: Run) -> list[HostPlan]:
    """Where a run may go, or may have gone: where it has been already, else where the plan says. An evaluation follows the selected run's
    data."""
    if run.host is not None:
        return [host for host in campaign.plan.hosts if host.name == run.host]
    if run.kind is RunKind.EVALUATE or run.continues is not None:
        return list(campaign.plan.hosts)  # work that a fence cut off goes on wherever the plan has a host: the one that it named is gone
    wanted = candidate_of(campaign, run).host
    return [host for host in campaign.plan.hosts if wanted in ("any", host.name)]


def take_over_placing(pen: Pen, run: Run, host: str, report: RunReport) -> bool:
    """Enter the placing of a run that its host has already. Whether it had been lost; what is wished of the run is then sent there."""
    spec = report.spec
    if spec is None or not is_unplaced(run) or spec.campaign_id != run.campaign_id:
        return False
    actor, because = f"host:{host}", f"{host} has it already, placed at {format_moment(spec.created_at)}: history had lost it"
    pen.write("run_placed", {"spec": encode(spec)}, run=run.run_id, host=host, actor=actor, because=because)
    if run.state is RunState.QUEUED:
        pen.move_run(run.run_id, RunState.STAGING, because, actor=actor)
    pen.move_run(run.run_id, RunState.STARTING, because, actor=actor)
    _take_over_stage(pen, run, host)
    return True


def _take_over_stage(pen: Pen, run: Run, host: str) -> None:
    """A campaign of which a run was placed had been staged: it is judged as one whose trainings go on, also if it never is staged again."""
    actor, because = f"host:{host}", f"{host} has {run.candidate} already: history had lost that it was staged"
    if pen.campaign(run.campaign_id).stage is CampaignStage.PREFLIGHT:
        pen.move_campaign(run.campaign_id, CampaignStage.STAGING, because, actor=actor)
    if pen.campaign(run.campaign_id).stage is CampaignStage.STAGING:
        pen.move_campaign(run.campaign_id, training_stage(pen.fleet, pen.campaign(run.campaign_id)), because, actor=actor)


def is_given_up(fleet: Fleet, sight: Sight, host: str) -> bool:
    """Whether a person has given this host up, with whatever it may have. A fence that stands before a cut of history may have fallen in the
    part that is lost, and the host been given new runs: it holds for those that it names alone, until it is said once more."""
    known = fleet.hosts.get(host)
    return known is not None and known.fenced is not None and known.fenced_sequence > sight.history_cut_at


def holders(sight: Sight, run: Run) -> list[str]:
    """Hosts that tell of this run although it is unplaced: what they had to start it with can't be read."""
    if run.host is not None:
        return []
    return [name for name, host in sight.hosts.items() if any(report.run_id == run.run_id for report in host.reports or ())]


def unheard(fleet: Fleet, sight: Sight, run: Run) -> list[str]:
    """Hosts that may have an unplaced run and were not asked for it yet, or have not answered; none that was given up."""
    return [host for host in _untold(fleet, sight, run) if not is_given_up(fleet, sight, host)]


def given_up(fleet: Fleet, sight: Sight, run: Run) -> list[str]:
    """Fenced hosts that may have an unplaced run, and could have told nothing about it when they were fenced."""
    flagged = [host.name for host in fleet.hosts.values() if host.fenced is not None and run.run_id in host.may_have]
    return [host for host in _untold(fleet, sight, run) if host in flagged] if flagged else []


def _untold(fleet: Fleet, sight: Sight, run: Run) -> list[str]:
    """What was added in this coordinator's life was placed by no other one; but ids are counted, and a life whose history is cut off may have
    added the same one before."""
    if not is_unplaced(run):
        return []
    campaign, found = fleet.campaigns[run.campaign_id], []
    for host in options(campaign, run):
        seen = sight.hosts.get(host.name)
        may_be_older = seen is None or seen.asked_since > run.added_at or campaign.launched_sequence <= sight.history_cut_at
        has_told = seen is not None and seen.reports is not None and run.run_id in seen.asked
        if may_be_older and not has_told:
            found.append(host.name)
    return found


def may_be_on(fleet: Fleet, sight: Sight, host: str) -> list[Run]:
    """The unplaced runs that this host may have."""
    return [run for run in fleet.runs.values() if is_unplaced(run) and host in _possible(fleet, sight, run)]


def may_be_elsewhere(fleet: Fleet, sight: Sight, run: Run, host: str | None = None) -> bool:
    """Whether a host that nobody has given up may have this unplaced run, other than `host`."""
    return not _possible(fleet, sight, run) <= {host}


def _possible(fleet: Fleet, sight: Sight, run: Run) -> set[str]:
    return {*holders(sight, run), *unheard(fleet, sight, run)}
