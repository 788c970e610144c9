"""A new directory that appears whole under its name, or not at all: every output of the format commands is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.errors import RequestRefused
from trainer.files import remove_tree, rename_without_replacing, sync_file, sync_folder


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling to write into; renamed to `target` at the end, synced, replacing nothing. RequestRefused when it exists."""
    target = target.absolute()
    if os.path.lexists(target):
        raise _there_already(target)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):  # what lies deepest first
            (sync_folder if path.is_dir() else sync_file)(path)
        sync_folder(temporary)
        rename_without_replacing(temporary, target)
        sync_folder(target.parent)
    except FileExistsError as fault:
        remove_tree(temporary, quietly=True)
        raise _there_already(target) from fault
    except OSError as fault:
        remove_tree(temporary, quietly=True)
        raise RequestRefused("the output can't be written", where=str(target), what=str(fault),
                             fix="free some space, or name another place") from fault
    except BaseException:
        remove_tree(temporary, quietly=True)
        raise


def _there_already(target: Path) -> RequestRefused:
    return RequestRefused("the output is there already", where=str(target), what="nothing is ever overwritten",
                          fix="name a directory that does not exist yet")
