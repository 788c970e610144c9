"""Reserved data between registration and the freeze: held back from every host, given out only against a frozen selection.

The vault takes the `FrozenSelection` itself as its argument, checks it against `frozen.json` and the ledger, and enters the
opening into the ledger before it says where the data lies. The files are held back, not encrypted: `_lay_in` and `verified_split`
are the two places that encryption will change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.coordinator.ledger import Act, Ledger, LedgerEntry, enter, read_ledger
from fleetd.coordinator.staging import CollectedRole
from fleetd.coordinator.trees import TEMPORARY_PREFIX, TreeFault, copy_tree, discard_tree, read_manifest, tree_fault, write_manifest
from fleetd.files import read_record, sync_folder
from fleetd.paths import CampaignPaths
from fleetd.wire import WireError
from policies.errors import DataDamaged, FreezeRefused, NoRoom, NotFound, RequestRefused
from policies.facts import Split
from policies.freeze import (
    FROZEN,
    OPENED,
    REGISTERED,
    FrozenSelection,
    Permitted,
    frozen_digest,
    may_open,
    openings_of,
    parse_frozen,
)
from policies.manifest import FileEntry

SEALED = "held back"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSplit:
    """A reserved split as it lies in the vault, whole."""

    folder: Path
    entries: tuple[FileEntry, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSplit:
    """A reserved split that may be read now. `shared`: this goes on with an opening whose predictions are not complete yet."""

    split: Split
    folder: Path
    entries: tuple[FileEntry, ...]
    digest: str
    number: int
    sequence: int
    shared: bool


def register_reserved(paths: CampaignPaths, reserved: tuple[CollectedRole, ...], digests: dict[str, str], act: Act) -> None:
    """Lay every reserved split into the vault and enter what was registered. A second time it only checks that nothing changed."""
    os.makedirs(paths.vault, mode=0o700, exist_ok=True)
    for role in reserved:
        _lay_in(paths, role)
    splits = {role.role.split.value: {"digest": role.digest, "files": len(role.entries), "sealed": SEALED} for role in reserved}
    entry = enter(paths.ledger, REGISTERED, {"splits": splits, "digests": digests}, act, unless=lambda ledger: ledger.first(REGISTERED))
    if entry.body["digests"] != digests or entry.body["splits"] != splits:
        raise RequestRefused(
            "the data of this campaign changed after it was registered", where=f"{paths.ledger}, entry {entry.sequence}",
            what=f"registered: {_short(entry.body['digests'])}; found now: {_short(digests)}",
            fix="put the files back as they were, or launch a new campaign",
        )


def open_split(paths: CampaignPaths, split: Split, frozen: FrozenSelection, act: Act, because: str = "") -> OpenedSplit:
    """The reserved split, its opening in the ledger first. FreezeRefused without the frozen selection of this very campaign, or for
    another look without a reason; NotFound when the plan has no such split; DataDamaged when the vault's copy is not whole."""
    check_frozen(paths, split, frozen)
    held = verified_split(paths, split)
    body: dict[str, Any] = {
        "split": split.value, "dataset_digest": held.digest, "frozen_sha256": frozen_digest(frozen), "because": because.strip(),
        "sealed": SEALED,
    }
    shared = False

    def unless(ledger: Ledger) -> LedgerEntry | None:
        """Judged under the ledger's lock, so that two openings at once can't both be the first."""
        nonlocal shared
        permit = may_open(split, frozen, openings_of(ledger.events), because)
        if not isinstance(permit, Permitted):
            raise permit
        body["number"] = permit.number
        shared = permit.shares is not None
        return ledger.entries[permit.shares.sequence - 1] if permit.shares is not None else None

    entry = enter(paths.ledger, OPENED, body, act, unless=unless)
    return OpenedSplit(
        split=split, folder=held.folder, entries=held.entries, digest=held.digest, number=entry.body["number"], sequence=entry.sequence,
        shared=shared,
    )


def verified_split(paths: CampaignPaths, split: Split) -> HeldSplit:
    """The vault's copy of a split as it was registered, every byte read. NotFound when the plan has none, DataDamaged when it changed.
    For this package alone: what leaves it goes through `open_split`."""
    digest = _registered_digest(paths, split)
    _check_whole(paths, split, digest)
    folder = paths.vault / split.value
    return HeldSplit(folder=folder, entries=read_manifest(folder), digest=digest)


def read_frozen(paths: CampaignPaths) -> FrozenSelection | None:
    """The frozen selection of a campaign, None before the freeze. FreezeRefused when frozen.json was changed."""
    try:
        return parse_frozen(read_record(paths.frozen))
    except FileNotFoundError:
        return None
    except (WireError, ValueError) as fault:
        raise _frozen_changed(paths, str(fault)) from fault


def check_frozen(paths: CampaignPaths, split: Split, frozen: FrozenSelection) -> None:
    """FreezeRefused unless the proof in hand, frozen.json and the ledger are one and the same selection."""
    if not isinstance(frozen, FrozenSelection):
        refusal = may_open(split, None, (), "")
        assert isinstance(refusal, FreezeRefused)
        raise refusal
    digest, entry = frozen_digest(frozen), read_ledger(paths.ledger).first(FROZEN)
    if entry is None:
        what, fix = "the ledger has no freeze", "let the campaign freeze its selection first"
        if paths.frozen.exists():
            what, fix = "frozen.json is there, but the entry of its freeze is gone from the ledger", "restore ledger.jsonl from a backup"
        raise FreezeRefused(f"{split} stays closed", where=str(paths.ledger), what=what, fix=fix)
    stored = read_frozen(paths)
    if stored is None or frozen_digest(stored) != entry.body["frozen_sha256"]:
        raise _frozen_changed(paths, f"it is not the selection that entry {entry.sequence} of the ledger froze")
    if entry.body["frozen_sha256"] != digest:
        what = f"the ledger froze selection {entry.body['frozen_sha256']}, this is {digest}"
        where = f"{paths.ledger}, entry {entry.sequence}"
        raise FreezeRefused(f"{split} stays closed", where=where, what=what, fix="use the selection in frozen.json")


def _registered_digest(paths: CampaignPaths, split: Split) -> str:
    entry = read_ledger(paths.ledger).first(REGISTERED)
    splits: dict[str, dict[str, Any]] = entry.body["splits"] if entry is not None else {}
    if split.value not in splits:
        what = f"registered reserved splits: {', '.join(sorted(splits)) or 'none'}"
        raise NotFound(f"this campaign has no {split} data", where=str(paths.ledger), what=what, fix="name one of them")
    return str(splits[split.value]["digest"])


def _check_whole(paths: CampaignPaths, split: Split, digest: str) -> None:
    fault = tree_fault(paths.vault / split.value, digest)
    if fault is not None:
        raise DataDamaged(
            f"the vault's copy of {split} is not what was registered", where=str(fault.path), what=fault.what,
            fix="restore that file as it was at registration, or launch a new campaign",
        )


def _lay_in(paths: CampaignPaths, role: CollectedRole) -> None:
    """Copy a reserved split into the vault, readable by this user alone. What lies there already must be the same."""
    final = paths.vault / role.role.split.value
    if final.exists():
        return _check_whole(paths, role.role.split, role.digest)
    temporary = paths.vault / f"{TEMPORARY_PREFIX}{role.role.split}"
    discard_tree(temporary)
    try:
        copy_tree(role.source, role.entries, temporary, private=True)
        write_manifest(temporary, role.entries, private=True)
        faults.before("vault in place")
        os.rename(temporary, final)
        sync_folder(paths.vault)
    except TreeFault as fault:
        title = f"can't put {role.role.split} into the vault"
        raise DataDamaged(title, where=str(fault.path), what=fault.what, fix="let nothing write there, then launch again") from fault
    except OSError as fault:
        fix = f"make room below {paths.root}; it is tried again by itself"
        raise NoRoom(f"can't put {role.role.split} into the vault", where=str(final), what=str(fault), fix=fix) from fault
    finally:
        discard_tree(temporary)


def _short(digests: dict[str, str]) -> str:
    return ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(digests.items()))


def _frozen_changed(paths: CampaignPaths, what: str) -> FreezeRefused:
    return FreezeRefused(
        "the frozen selection was changed, so nothing is opened", where=str(paths.frozen), what=what,
        fix="restore frozen.json from a backup: the ledger holds its SHA-256",
    )
