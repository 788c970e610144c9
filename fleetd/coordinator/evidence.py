"""What the candidates are judged by, read again from the store and compared with the run directories where their hosts answer.

A changed byte or a broken claim refuses the whole candidate, with the file and both digests; a file that is honest but can't be
compared refuses its checkpoint alone. The other candidates go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleetd.coordinator.couriers import Courier
from fleetd.coordinator.predictions import Distrusted, Scored, Unfit, score_file, short
from fleetd.coordinator.registration import RegisteredSet
from fleetd.coordinator.replication import replicate_predictions
from fleetd.coordinator.trees import TreeFault, read_entry
from fleetd.fleet import Run, Validated
from fleetd.paths import CampaignPaths
from policies.errors import DataDamaged, HostUnreachable, NotFound
from policies.facts import step_name, step_of
from policies.selection import CandidateEvidence, CheckpointEvidence

PLACE = "predictions/validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProof:
    """One prediction file that took part, with the digests of its rows and its meta as they were read for the choice."""

    run_id: str
    step: int
    sha256: str
    meta_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """One candidate's evidence. `compared` says whether its host answered, so that both copies were compared."""

    candidate: CandidateEvidence
    files: tuple[FileProof, ...] = ()
    compared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCopy:
    """SHA-256 of each prediction file in the run directory; None when the host does not answer."""

    host: str
    sha256: dict[str, str] | None


def gather_evidence(
    paths: CampaignPaths, runs: tuple[Run, ...], couriers: Mapping[str, Courier], registered: RegisteredSet | None,
) -> tuple[RunEvidence, ...]:
    """The evidence of every training run. `couriers` by host name; a host without one counts as silent."""
    found = {run.run_id: _of_run(paths, run, couriers.get(run.host or ""), registered) for run in runs}
    for run in runs:  # in the order in which they were added: whoever is continued comes before who continues
        if run.continues is not None and run.continues.run_id in found:
            found[run.run_id] = _continued(run, found[run.run_id], found[run.continues.run_id])
    return tuple(_left_off(found[run.run_id], run) for run in runs)


def _continued(run: Run, later: RunEvidence, earlier: RunEvidence) -> RunEvidence:
    """One line of work over two runs: what the first had validated up to the copy that the second began with, then the second's own."""
    begins = run.continues
    if begins is None or begins.step is None:
        return later
    own = {each.step: each for each in later.candidate.checkpoints}
    before = {each.step: each for each in earlier.candidate.checkpoints if each.step <= begins.step}
    repeated = {step for step, each in own.items() if each.refused is None or step not in before}
    checkpoints = tuple((own if step in repeated else before)[step] for step in sorted({*own, *before}))
    inherited = tuple(file for file in earlier.files if file.step in before and file.step not in repeated)
    kept = tuple(file for file in later.files if file.step in repeated)
    refused = (later.candidate.refused if run.spec is not None else None) or earlier.candidate.refused
    return replace(later, candidate=replace(later.candidate, checkpoints=checkpoints, refused=refused), files=(*inherited, *kept))


def _left_off(evidence: RunEvidence, run: Run) -> RunEvidence:
    """A run whose work goes on in another one takes part there, and not a second time by itself."""
    if run.successor is None or evidence.candidate.refused is not None:
        return evidence
    refused = f"its host was fenced; what was copied of it takes part in {run.successor}"
    return replace(evidence, candidate=replace(evidence.candidate, refused=refused), files=())


def _of_run(paths: CampaignPaths, run: Run, courier: Courier | None, registered: RegisteredSet | None) -> RunEvidence:
    excluded = _excluded(run, registered)
    if excluded is not None or registered is None:
        return RunEvidence(candidate=CandidateEvidence(run_id=run.run_id, candidate=run.candidate, checkpoints=(), refused=excluded))
    claims = {claim.step: claim for claim in run.validated}
    faults, courier = _bring(paths, run, courier, claims)
    host_copy = _look(run, courier)
    checkpoints: list[CheckpointEvidence] = []
    files: list[FileProof] = []
    distrust: list[str] = []
    for step in sorted(set(claims) | _stored_steps(paths, run)):
        changed = _copies_differ(paths, run, step, claims.get(step), host_copy)
        verdict = changed or faults.get(step) or _judge(paths, run, step, registered, host_copy)
        if isinstance(verdict, Scored):
            files.append(FileProof(run_id=run.run_id, step=step, sha256=verdict.sha256, meta_sha256=verdict.meta_sha256))
        if isinstance(verdict, Distrusted):
            distrust.append(verdict.because)
        checkpoints.append(_checkpoint(step, verdict))
    refused = f"the whole candidate is refused: {'; '.join(distrust)}" if distrust else inexactness(run)
    candidate = CandidateEvidence(run_id=run.run_id, candidate=run.candidate, checkpoints=tuple(checkpoints), refused=refused)
    return RunEvidence(candidate=candidate, files=tuple(files), compared=host_copy.sha256 is not None)


def _excluded(run: Run, registered: RegisteredSet | None) -> str | None:
    """Why nothing of this run can be compared, whatever it wrote."""
    if run.spec is None:
        return f"it never started: {run.detail}" if run.detail else "it never started"
    if not run.spec.contract:
        return "a command of its own writes no validation predictions, so it can't be compared"
    if registered is None:
        return "the plan's validation data is plain files, so no validation set is registered"
    return None


def inexactness(run: Run) -> str | None:
    """What a proof that the plan requires found wrong with this run; None when it found nothing, or could not be made."""
    proof = run.proof or {}
    if proof.get("required") is not True or proof.get("verdict") != "inexact":
        return None
    return f"it is not exact, and its plan requires that: {proof.get('because')}"


def _bring(
    paths: CampaignPaths, run: Run, courier: Courier | None, claims: dict[int, Validated],
) -> tuple[dict[int, Distrusted | Unfit], Courier | None]:
    """Fetch what is not in the store yet. Verdicts by step on what can't be had, and the courier as long as its host answers."""
    verdicts: dict[int, Distrusted | Unfit] = {}
    for step, claim in sorted(claims.items()):
        if courier is None:
            break
        try:
            replicate_predictions(courier, paths, run.run_id, step, claim.sha256 or None)
        except HostUnreachable:
            courier = None
        except NotFound as fault:
            verdicts[step] = Distrusted(because=f"{PLACE}/{step_name(step)} was reported, but is no longer there: {fault.what} ({fault.where})")
        except DataDamaged as fault:
            verdicts[step] = Distrusted(because=f"{fault.where}: {fault.what}")
    return verdicts, courier


def _look(run: Run, courier: Courier | None) -> _HostCopy:
    host = run.host or "?"
    if courier is None:
        return _HostCopy(host=host, sha256=None)
    try:
        return _HostCopy(host=host, sha256={entry.path: entry.sha256 for entry in courier.look(run.run_id, PLACE)})
    except HostUnreachable:
        return _HostCopy(host=host, sha256=None)
    except (TreeFault, OSError) as fault:
        return _HostCopy(host=f"{host} ({fault})", sha256={})


def _stored_steps(paths: CampaignPaths, run: Run) -> set[int]:
    found = (step_of(path.name.removesuffix(".jsonl")) for path in (paths.store_run(run.run_id) / PLACE).glob("*.jsonl"))
    return {step for step in found if step is not None}


def _copies_differ(paths: CampaignPaths, run: Run, step: int, claim: Validated | None, host_copy: _HostCopy) -> Distrusted | None:
    """How the store's files differ from those on the host, or from what the host told when it wrote them."""
    folder = paths.store_run(run.run_id) / PLACE
    for file in (f"{step_name(step)}.jsonl", f"{step_name(step)}.meta.json"):
        if not os.path.lexists(folder / file):
            continue
        try:
            stored = read_entry(folder, file).sha256
        except TreeFault as fault:
            return Distrusted(because=f"{PLACE}/{file} in the store: {fault.what}")
        because = f"{PLACE}/{file} was changed: SHA-256 in the store {stored}"
        if host_copy.sha256 is not None and host_copy.sha256.get(file) != stored:
            other = host_copy.sha256.get(file) or "no such file"
            return Distrusted(because=f"{because}, in the run directory on host {host_copy.host} {other}")
        if file.endswith(".jsonl") and claim is not None and claim.sha256 and claim.sha256 != stored:
            return Distrusted(because=f"{because}, host {host_copy.host} reported {claim.sha256}")
    return None


def _judge(paths: CampaignPaths, run: Run, step: int, registered: RegisteredSet, host_copy: _HostCopy) -> Scored | Unfit | Distrusted:
    """What one checkpoint's predictions say, both copies being the same."""
    folder, name = paths.store_run(run.run_id) / PLACE, step_name(step)
    if not (folder / f"{name}.jsonl").exists() and host_copy.sha256 is None:
        return Unfit(because=f"left out: host {host_copy.host} does not answer, and its predictions were never copied")
    verdict = score_file(folder, name, registered)
    if isinstance(verdict, Scored):
        return _checkpoint_known(paths, run, step, verdict) or verdict
    return verdict


def _checkpoint_known(paths: CampaignPaths, run: Run, step: int, scored: Scored) -> Unfit | None:
    """Unfit unless the predictions are of a checkpoint that the run reported at this very step."""
    digest = scored.meta.checkpoint_digest
    if scored.meta.step != step:
        return Unfit(because=f"{step_name(step)}: its meta says step {scored.meta.step}", checkpoint_digest=digest or "")
    reported = {saved.digest for saved in run.saved if saved.step == step} | _logged_digests(paths, run, step)
    if digest not in reported:
        known = ", ".join(short(each) for each in sorted(reported)) or "none"
        because = f"{step_name(step)}: made from checkpoint {short(digest)}, the run reported {known} there"
        return Unfit(because=because, checkpoint_digest=digest or "")
    return None


def _logged_digests(paths: CampaignPaths, run: Run, step: int) -> set[str]:
    """Checkpoints of `step` that the run's own log tells of: a supervisor that died may have missed a save."""
    try:
        lines = (paths.store_run(run.run_id) / "log.jsonl").read_bytes().splitlines()
    except OSError:
        return set()
    digests = set()
    for line in lines:
        try:
            record = json.loads(line) if b'"save"' in line else None
        except ValueError:
            continue  # a torn line
        if isinstance(record, dict) and record.get("event") == "save" and record.get("step") == step and isinstance(record.get("digest"), str):
            digests.add(record["digest"])
    return digests


def _checkpoint(step: int, verdict: Scored | Unfit | Distrusted) -> CheckpointEvidence:
    if isinstance(verdict, Scored):
        return CheckpointEvidence(step=step, checkpoint_digest=verdict.meta.checkpoint_digest or "", value=verdict.score.value)
    return CheckpointEvidence(step=step, checkpoint_digest=verdict.checkpoint_digest, value=None, refused=verdict.because)
