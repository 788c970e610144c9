"""The order for a run, made from the plan and the staged digests alone: the same facts always give the same RunSpec and task.

A trainer of ours gets `-m trainer` with the release on its path; a user's own command gets its argv as it stands in the plan and
nothing of ours on any path.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd.campaign import AfterFreeze, CandidatePlan, DataRole, HostPlan
from fleetd.environments import PLAIN_PYTHONS, environment_python
from fleetd.fleet import Campaign, Run
from fleetd.model import Caps, DeadlineTerms, Owner, RunSpec, WantOrder
from fleetd.paths import HostPaths
from policies.facts import ENV_PYTHON, RunKind, Split, Want

EVALUATE_PREFIX = "evaluate-"
SELECTED, BASE = "selected", "base"
RELEASE = "release"
ENVIRONMENT = "environment"
SSH_PYTHON = "python3"


def candidate_of(campaign: Campaign, run: Run) -> CandidatePlan:
    """The plan's line for a training run."""
    return next(candidate for candidate in campaign.plan.candidates if candidate.name == run.candidate)


def asking(campaign: Campaign, run: Run) -> CandidatePlan | AfterFreeze:
    """The part of the plan that says what a run may use."""
    return campaign.plan.after_freeze if run.kind is RunKind.EVALUATE else candidate_of(campaign, run)


def caps_of(terms: CandidatePlan | AfterFreeze) -> Caps:
    """What it asks of a host, before that host's floor is known."""
    return Caps(host_bytes=terms.memory_host_bytes, accelerator_bytes=terms.memory_accelerator_bytes, floor_bytes=0, demand=terms.memory_demand)


def host_plan(campaign: Campaign, name: str) -> HostPlan:
    return next(host for host in campaign.plan.hosts if host.name == name)


def role(campaign: Campaign, split: Split) -> DataRole | None:
    return next((each for each in campaign.plan.data if each.split == split), None)


def release_key(host: str) -> str:
    """Under which digest-key a campaign remembers the release of one host: another architecture has another one."""
    return f"{RELEASE}:{host}"


def environment_key(host: str) -> str:
    """Under which digest-key a campaign remembers the environment of one host: `<lock digest>/<flavour>`."""
    return f"{ENVIRONMENT}:{host}"


def built_python(campaign: Campaign, host: HostPlan) -> str | None:
    """The interpreter of the environment that was built for this campaign on this host; None where the plan asks for none."""
    name = campaign.digests.get(environment_key(host.name)) if host.environment is not None else None
    return environment_python(host.root, name) if name is not None else None


def trainer_python(host: HostPlan, own: str) -> str:
    """The interpreter of our trainer on a host without an environment; `own` is the coordinator's, which no other machine has."""
    return host.python or (own if host.is_local else SSH_PYTHON)


def agent_python(host: HostPlan, own: str) -> str:
    """The interpreter of agent, supervisor and shim on this host."""
    return host.agent_python or (own if host.is_local else SSH_PYTHON)


def split_of(run: Run) -> Split:
    """The reserved split that an evaluation run judges."""
    assert run.kind is RunKind.EVALUATE and run.candidate.startswith(EVALUATE_PREFIX)
    return Split(run.candidate[len(EVALUATE_PREFIX):])


def asked_bytes(campaign: Campaign, run: Run, *, has_accelerator: bool) -> int:
    """Bytes that admission counts for a run: the host part, and the accelerator part where the host has one."""
    caps = caps_of(asking(campaign, run))
    return caps.host_bytes + (caps.accelerator_bytes if has_accelerator else 0)


def build_spec(campaign: Campaign, run: Run, host: HostPlan, *, owner: Owner, python: str, now: datetime) -> RunSpec:
    """The order to place `run` on `host` now."""
    deadline = DeadlineTerms(final_at=campaign.final_at, cutoff_at=campaign.cutoff_at)
    caps = replace(caps_of(asking(campaign, run)), floor_bytes=host.floor_bytes)
    release = campaign.digests.get(release_key(host.name)) or campaign.digests[RELEASE]
    ours = _our_environment(host, release)
    built = built_python(campaign, host)
    interpreter = built or trainer_python(host, python)
    if run.kind is RunKind.EVALUATE:
        return RunSpec(
            run_id=run.run_id, campaign_id=campaign.campaign_id, candidate=run.candidate, kind=run.kind, owner=owner, created_at=now,
            argv=(interpreter, "-m", "trainer", "evaluate"), environment=ours, release_digest=release, caps=caps,
            deadline=DeadlineTerms(final_at=campaign.final_at, cutoff_at=campaign.final_at),
            digests=_digests(campaign, split_of(run), host, release), continues=run.continues,
        )
    candidate = candidate_of(campaign, run)
    contract = candidate.command is None
    argv = (interpreter, "-m", "trainer", "train") if candidate.command is None else _command(candidate.command, built)
    given = candidate.environment if built is None or contract else {ENV_PYTHON: built, **candidate.environment}
    return RunSpec(
        run_id=run.run_id, campaign_id=campaign.campaign_id, candidate=run.candidate, kind=run.kind, owner=owner, created_at=now,
        argv=argv, environment={**ours, **given} if contract else dict(given),
        working_directory=candidate.working_directory, signal=candidate.signal, contract=contract, release_digest=release, caps=caps,
        deadline=deadline, stop=candidate.stop, restarts=candidate.restarts, stall=candidate.stall, on_reboot=candidate.on_reboot,
        digests=_digests(campaign, Split.VALIDATION, host, release), continues=run.continues,
    )


def build_task(campaign: Campaign, run: Run, host: HostPlan) -> dict[str, Any] | None:
    """task.json of our trainer, with every path as it lies on `host`. None for a user's command."""
    if run.kind is RunKind.EVALUATE:
        return _evaluation_task(campaign, split_of(run), host)
    candidate = candidate_of(campaign, run)
    if candidate.task is None:
        return None
    given = dict(candidate.task.get("data", {}))
    staged = [split for split in (Split.TRAIN, Split.VALIDATION) if role(campaign, split)]
    data = {split.value: {**given.get(split.value, {}), **_data(campaign, split, host)} for split in staged}
    return {"schema": 1, "task": "language_model", **candidate.task, "data": {**given, **data}}


def can_be_built(campaign: Campaign, run: Run) -> bool:
    """Whether history holds what `build_task` needs; a salvaged one may have lost it for a run whose host has it."""
    is_look = run.kind is RunKind.EVALUATE
    read = (Split.TRAIN, split_of(run) if is_look else Split.VALIDATION)
    is_known = all(each.value in campaign.digests for each in read if role(campaign, each))
    return is_known and (campaign.selection is not None or not is_look)


def wish(run: Run, campaign: Campaign) -> WantOrder:
    """What is wished of a run: the newest order, or the first one, to run."""
    return run.want or WantOrder(sequence=1, want=Want.RUN, actor="coordinator", at=campaign.launched_at)


def _evaluation_task(campaign: Campaign, split: Split, host: HostPlan) -> dict[str, Any]:
    models = HostPaths(Path(host.root)).models
    selection = campaign.selection or {}
    digests = {SELECTED: selection["checkpoint_digest"], BASE: selection["base_checkpoint_digest"]}
    trained = next((each.task for each in campaign.plan.candidates if each.name == selection["candidate"]), None) or {}
    taken: dict[str, Any] = {key: trained[key] for key in ("window", "batch", "threads", "device", "precision") if key in trained}
    return {
        "schema": 1, "task": "evaluate_language_model", "split": split.value, **taken, **campaign.plan.after_freeze.settings,
        "data": {each.value: _data(campaign, each, host) for each in (Split.TRAIN, split) if role(campaign, each)},
        "models": {name: {"path": str(models / digest), "digest": digest} for name, digest in digests.items()},
    }


def _data(campaign: Campaign, split: Split, host: HostPlan) -> dict[str, Any]:
    found = role(campaign, split)
    assert found is not None
    digest = campaign.digests[split.value]
    described = {"path": str(HostPaths(Path(host.root)).datasets / digest), "digest": digest, "split": found.shard_split or split.value}
    limit = found.tokens_per_document_max
    return described if limit is None else {**described, "tokens_per_document_max": limit}


def _digests(campaign: Campaign, scored: Split, host: HostPlan, release: str) -> dict[str, str]:
    """What a run is made of, by role: data, code, and where one was built its environment."""
    data = {name: campaign.digests[name] for name in (Split.TRAIN.value, scored.value) if name in campaign.digests}
    name = campaign.digests.get(environment_key(host.name)) if host.environment is not None else None
    return {**data, RELEASE: release, **({ENVIRONMENT: name} if name is not None else {})}


def _command(command: tuple[str, ...], built: str | None) -> tuple[str, ...]:
    return (built, *command[1:]) if built is not None and command[0] in PLAIN_PYTHONS else command


def _our_environment(host: HostPlan, release: str) -> dict[str, str]:
    return {"PYTHONPATH": str(HostPaths(Path(host.root)).releases / release), "PYTHONSAFEPATH": "1"}
