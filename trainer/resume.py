"""Which checkpoint a run goes on from: the one that is named, else the newest that verifies. No torch.

What does not verify is told in lineage.jsonl and moved out of the way, its bytes kept, because the training will come to that
step again and nothing is overwritten.
"""

from __future__ import annotations

from pathlib import Path

from policies.errors import CheckpointDamaged
from policies.facts import step_of
from trainer.checkpoint import Checkpoint, newest_verified, set_aside, sweep, verify
from trainer.records import RunRecords


def choose_checkpoint(folder: Path, named: Path | None, records: RunRecords) -> Checkpoint | None:
    """The checkpoint to resume from, None to begin at step 0. CheckpointDamaged when one outside this run was named and is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sweep(folder):
        records.lineage("prune", name=name, because="left by a process that is gone")
    if named is not None:
        try:
            return _named(named)
        except CheckpointDamaged as damage:
            if named.absolute().parent != folder.absolute():
                raise
            records.lineage("refuse", name=named.name, because=damage.what)
            print(f"{damage}\n  so the newest one that verifies is taken", flush=True)
    scan = newest_verified(folder)
    for path, why in scan.skipped:
        kept = set_aside(path)
        records.lineage("refuse", name=path.name, because=why, kept_as=kept.name)
        print(f"checkpoint {path.name} is not used: {why}; kept as {kept.name}", flush=True)
    return scan.newest


def _named(path: Path) -> Checkpoint:
    if not path.is_dir() or step_of(path.name) is None:
        raise CheckpointDamaged("the named checkpoint can't be used", where=str(path), what="there is no checkpoint directory of that name",
                                fix="set FLEETD_RESUME to a directory step-NNNNNNNNN, or leave it out")
    return verify(path)
