"""Errors that explain themselves in three lines: what happened, where, what to do next.

    ExplainedError
    ├── PlanInvalid        the plan can't be read as one               exit 2
    ├── RequestRefused     the request can't be granted now            exit 3
    │   ├── NoRoom         a disk is full: nothing was done, it is tried again
    │   └── NotFound       nothing has that name                       exit 4
    ├── FreezeRefused      the freeze forbids it                       exit 9
    ├── HostUnreachable    a host does not answer                      exit 8
    │   └── GenerationStale, OwnerMismatch   it answers, to another    exit 1
    ├── HostKeyRefused     who answers is not proven to be the host    exit 8
    ├── LoginRefused       the host lets nobody in with these keys     exit 8
    ├── JournalDamaged, LedgerDamaged, CheckpointDamaged, DataDamaged  exit 1
    ├── ResumeMismatch     the state belongs to another run            exit 1
    └── LossNotFinite, GateFailed   the numbers broke                  exit 5
An IllegalTransition or AssertionError is our mistake: exit 70.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_NOT_FOUND = 4
EXIT_RUN_FAILED = 5
EXIT_STOPPED = 6
EXIT_UNFINISHED = 7
EXIT_UNREACHABLE = 8
EXIT_FREEZE = 9
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class ExplainedError(Exception):
    """An expected failure. `what` happened, `where` (path, run, host, step), `fix` as a command or an act that works."""

    exit_code = EXIT_ERROR

    def __init__(self, title: str, *, where: str, what: str, fix: str) -> None:
        super().__init__(title)
        self.title, self.where, self.what, self.fix = title, where, what, fix

    def __str__(self) -> str:
        return f"{self.title}\n  where: {self.where}\n  what:  {self.what}\n  fix:   {self.fix}"

    def to_json(self) -> dict[str, str]:
        return {"error": type(self).__name__, "title": self.title, "where": self.where, "what": self.what, "fix": self.fix}


class PlanInvalid(ExplainedError):
    exit_code = EXIT_USAGE


class RequestRefused(ExplainedError):
    exit_code = EXIT_PREFLIGHT


class NotFound(RequestRefused):
    exit_code = EXIT_NOT_FOUND


class NoRoom(RequestRefused):
    """A disk has no room for what was to be done. Nothing of it was left behind, and whoever wanted it tries again by itself."""


class FreezeRefused(ExplainedError):
    exit_code = EXIT_FREEZE


class HostUnreachable(ExplainedError):
    exit_code = EXIT_UNREACHABLE


class HostKeyRefused(ExplainedError):
    """Whoever answers shows a key that is unknown, changed, revoked, or vouched for in a way that can't be checked. Nothing was sent to it."""

    exit_code = EXIT_UNREACHABLE


class LoginRefused(ExplainedError):
    """The host is who it should be, and refuses the user or every key that was offered."""

    exit_code = EXIT_UNREACHABLE


class GenerationStale(ExplainedError):
    """The host has obeyed a newer generation of this coordinator."""


class OwnerMismatch(ExplainedError):
    """The host belongs to another coordinator until `fleetd takeover`."""


class JournalDamaged(ExplainedError):
    pass


class LedgerDamaged(ExplainedError):
    """The chain of freeze and openings does not verify: nothing is opened and nothing is added until a person has looked."""


class CheckpointDamaged(ExplainedError):
    pass


class DataDamaged(ExplainedError):
    pass


class ResumeMismatch(ExplainedError):
    pass


class LossNotFinite(ExplainedError):
    exit_code = EXIT_RUN_FAILED


class GateFailed(ExplainedError):
    exit_code = EXIT_RUN_FAILED


class IllegalTransition(AssertionError):
    """A state change that the table does not hold: our mistake, never the world's."""


ERRORS_BY_NAME: dict[str, type[ExplainedError]] = {
    kind.__name__: kind
    for kind in (
        ExplainedError, PlanInvalid, RequestRefused, NoRoom, NotFound, FreezeRefused, HostUnreachable, HostKeyRefused, LoginRefused,
        GenerationStale, OwnerMismatch, JournalDamaged, LedgerDamaged, CheckpointDamaged, DataDamaged, ResumeMismatch, LossNotFinite, GateFailed,
    )
}


def from_json(body: dict[str, str]) -> ExplainedError:
    """The error that `to_json` described, as it crossed a pipe or a socket."""
    kind = ERRORS_BY_NAME.get(str(body.get("error", "")), ExplainedError)
    where, what, fix = (str(body.get(name, "?")) for name in ("where", "what", "fix"))
    return kind(str(body.get("title", "unknown error")), where=where, what=what, fix=fix)
