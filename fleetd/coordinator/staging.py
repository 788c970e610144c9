"""The data of a campaign on its way to the hosts: which files a role has, under which digest, and bringing them there once.

Only train and validation data travel here. Reserved splits go into the vault and leave it through `evaluation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fleetd.campaign import DataRole, Plan
from fleetd.contents import content_fault
from fleetd.coordinator.corpora import TOKENS_NAME, CorpusFacts, check_corpus, read_corpus
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.shards import ShardSet, check_shards, read_shard_set
from fleetd.coordinator.trees import TreeFault, read_entry
from fleetd.files import files_below
from policies.errors import DataDamaged, ExplainedError, RequestRefused
from policies.facts import RESERVED_SPLITS, Split
from policies.manifest import MANIFEST_NAME, FileEntry, directory_digest

OPEN_SPLITS = (Split.TRAIN, Split.VALIDATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRole:
    """One role's files as they were read just now: `shards` for token shards, `corpus` for a Zrodlo corpus, neither for plain files."""

    role: DataRole
    source: Path
    entries: tuple[FileEntry, ...]
    shards: ShardSet | None
    corpus: CorpusFacts | None = None

    @property
    def digest(self) -> str:
        return directory_digest(self.entries)

    @property
    def content(self) -> tuple[FileEntry, ...]:
        """The files that are data: of shards and corpora the tokens alone, since index and tokenizer belong to every split."""
        if self.corpus is not None:
            return tuple(entry for entry in self.entries if entry.path == TOKENS_NAME)
        if self.shards is None:
            return tuple(entry for entry in self.entries if entry.bytes)
        names = {shard.name for shard in self.shards.shards}
        return tuple(entry for entry in self.entries if entry.path in names)


def collect_role(directory: str, role: DataRole) -> CollectedRole:
    """Read every file of a role once and verify what can be verified. DataDamaged or RequestRefused name the file."""
    source = Path(directory) / role.path
    if not source.is_dir():
        fix = "correct path of this role in the plan"
        raise DataDamaged(f"the {role.split} data is not there", where=str(source), what="it is no directory", fix=fix)
    shards = None
    try:
        check_contents(source, files_shown(source, role))
        if role.shard_split is not None:
            shards = read_shard_set(source, role.shard_split, role.include, scored=role.split != Split.TRAIN)
        names = shards.files if shards is not None else _included(source, role.include)
        entries = tuple(read_entry(source, name) for name in names)
    except TreeFault as fault:
        raise _unreadable(role, fault.path, fault.what) from fault
    except OSError as fault:
        raise _unreadable(role, source, str(fault)) from fault
    if not entries or MANIFEST_NAME in names:
        what = f"{MANIFEST_NAME} is the name of fleetd's own list" if entries else f"no file matches {', '.join(role.include)}"
        raise RequestRefused(f"the {role.split} data can't be staged", where=str(source), what=what, fix="correct include of this role in the plan")
    if shards is not None:
        check_shards(source, shards, entries)
    corpus = read_corpus(source) if role.is_corpus else None
    if corpus is not None:
        check_corpus(source, corpus, entries)
    return CollectedRole(role=role, source=source, entries=entries, shards=shards, corpus=corpus)


def check_contents(source: Path, names: tuple[str, ...]) -> None:
    """TreeFault for the first file that is not what its name says: named as what it is, before a reader calls it unreadable."""
    for name in names:
        if not (source / name).is_symlink() and (source / name).is_file() and (what := content_fault(source / name)) is not None:
            raise TreeFault(source / name, what)


def source_faults(plan: Plan) -> tuple[ExplainedError, ...]:
    """What the first bytes and the sizes of all files of the plan's data say against them: seen without reading them whole."""
    found = []
    for role in plan.data:
        source = Path(plan.directory) / role.path
        try:
            check_contents(source, files_shown(source, role))
        except TreeFault as fault:
            found.append(_unreadable(role, fault.path, fault.what))
        except OSError as fault:
            found.append(_unreadable(role, source, str(fault)))
    return tuple(found)


def check_disjoint(collected: tuple[CollectedRole, ...]) -> None:
    """RequestRefused when one file is both open (train, validation) and reserved data: the judgement would be worthless."""
    seen = {entry.sha256: (role, entry) for role in collected if role.role.split in OPEN_SPLITS for entry in role.content}
    for reserved in collected:
        for entry in reserved.content:
            if reserved.role.split in RESERVED_SPLITS and entry.sha256 in seen:
                role, twin = seen[entry.sha256]
                raise RequestRefused(
                    f"{role.role.split} and {reserved.role.split} share a file", where=str(reserved.source / entry.path),
                    what=f"its bytes are those of {role.source / twin.path} (SHA-256 {entry.sha256})",
                    fix=f"remove it from {role.role.split} or from {reserved.role.split} in the plan",
                )


def role_of(plan: Plan, split: Split) -> DataRole | None:
    return next((role for role in plan.data if role.split == split), None)


def stage_data(plan: Plan, digests: dict[str, str], courier: Courier) -> None:
    """Bring train and validation data to a host, as registered. A host that has them, whole, is sent nothing."""
    for split in OPEN_SPLITS:
        if role_of(plan, split) is not None:
            stage_role(plan, split, digests[split.value], courier)


def stage_role(plan: Plan, split: Split, digest: str, courier: Courier) -> bool:
    """Bring one open role to a host; False when it was there. DataDamaged when the source is no longer what was registered."""
    assert split in OPEN_SPLITS, "reserved data leaves the vault only"
    if courier.has_tree(TreeKind.DATASETS, digest) and courier.tree_fault(TreeKind.DATASETS, digest) is None:
        return False
    role = role_of(plan, split)
    assert role is not None
    collected = collect_role(plan.directory, role)
    if collected.digest != digest:
        raise DataDamaged(
            f"the {split} data changed since the campaign was registered", where=str(collected.source),
            what=f"its digest is {collected.digest}, registered is {digest}", fix="put the files back as they were, or launch a new campaign",
        )
    return courier.put_tree(TreeKind.DATASETS, digest, collected.source, collected.entries)


def _included(source: Path, include: tuple[str, ...]) -> tuple[str, ...]:
    """Files below `source` that match a pattern, by their path or by their name alone."""
    return tuple(name for name in files_below(source) if any(fnmatchcase(name, each) or fnmatchcase(Path(name).name, each) for each in include))


def files_shown(source: Path, role: DataRole) -> tuple[str, ...]:
    """Files of a role before anybody knows which of them it really has: an index that is a pointer lists nothing."""
    if role.shard_split is None:
        return _included(source, role.include)
    return tuple(sorted(each.name for each in source.iterdir() if any(fnmatchcase(each.name, pattern) for pattern in role.include)))


def _unreadable(role: DataRole, path: Path, what: str) -> ExplainedError:
    return DataDamaged(f"the {role.split} data can't be used", where=str(path), what=what, fix="repair that file, then launch again")
