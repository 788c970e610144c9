"""What `fleetd check` shows of each host: the look that a launch would take, as rows for `plan_view`. Pure, from the Preflight document.

Who takes the look is `look_at_hosts`: the running coordinator, else a child of this command; the screens themselves reach no host.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

from fleetd.plan import LoadedPlan
from fleetd.plan_units import show_size
from fleetd.screens import terminal, words
from fleetd.screens.cells import grade_words
from fleetd.screens.client import Client, CoordinatorAway
from fleetd.screens.document import Document, number
from fleetd.screens.layout import Line, Span, Tone, line, quiet
from fleetd.wire import WireError, dumps, encode, loads
from policies.errors import ERRORS_BY_NAME, ExplainedError, HostUnreachable, RequestRefused

CHILD_SECONDS_MAX = 600.0
WORDS_MAX = 300

Rows = list[tuple[str, list[Line]]]


def look_at_hosts(loaded: LoadedPlan) -> Document:
    """The Preflight of the plan now. By the coordinator where one answers: its user, its keys, its way to the hosts are those of a launch."""
    paths = terminal.coordinator().paths
    if not paths.socket.exists():
        return _by_child(loaded)
    try:
        with Client(paths) as client:
            return client.check(encode(loaded.plan))
    except CoordinatorAway:
        return _by_child(loaded)


def _by_child(loaded: LoadedPlan) -> Document:
    argv = [sys.executable, "-m", "fleetd.coordinator.check"]
    try:
        done = subprocess.run(argv, input=dumps(loaded.plan), capture_output=True, text=True, timeout=CHILD_SECONDS_MAX, check=False)
        found = loads(done.stdout)
        assert isinstance(found, dict), "check prints one object"
    except (OSError, subprocess.TimeoutExpired, WireError) as fault:
        said = done.stderr.strip()[-WORDS_MAX:] if isinstance(fault, WireError) else str(fault)
        fix = "fleetd check --no-hosts PLAN   (the plan alone)"
        raise RequestRefused("the hosts can't be looked at", where=" ".join(argv), what=said or "no words", fix=fix) from fault
    return found


def faults_of(looked: Document) -> list[ExplainedError]:
    """What a launch would be refused for; a host that does not answer keeps its own kind of error."""
    silent = looked.get("silent") or {}
    faults: list[ExplainedError] = []
    for each in looked.get("findings") or []:
        if each.get("refuses"):
            told = silent.get(each.get("host")) or {}
            kind = ERRORS_BY_NAME.get(str(told.get("error")), RequestRefused) if told.get("title") == each["title"] else RequestRefused
            where = f"host {each['host']}" if each["host"] else "the plan's data"
            faults.append(kind(each["title"], where=where, what=each["what"], fix=each["fix"]))
    return sorted(faults, key=lambda fault: isinstance(fault, HostUnreachable))


def host_rows(looked: Document, name: str) -> Rows:
    """Everything that was seen of one host, and after it what was said of it."""
    look = (looked.get("looks") or {}).get(name)
    rows: Rows = [] if look is None else [*_seen(look["survey"], look), *_caps(look), *_python(look), *_environment(look), *_displaced(look)]
    told = [each for each in looked.get("findings") or [] if each.get("host") == name]
    return [*rows, *(("", [_finding(each)]) for each in told)]


def data_rows(looked: Document) -> Rows:
    """What was said of the plan's own data, which belongs to no host."""
    return [("", [_finding(each)]) for each in looked.get("findings") or [] if not each.get("host")]


def _finding(each: Document) -> Line:
    tone, mark = (Tone.BAD, "! refused: ") if each.get("refuses") else (Tone.WARN, "~ worth knowing: ")
    what, fix = words.one_line(each.get("what")), words.one_line(each.get("fix"))
    return line(Span(f"{mark}{words.one_line(each.get('title'))}", tone), f": {what}", quiet(f"  ({fix})"))


def _seen(survey: Document, look: Document) -> Rows:
    named = ("hostname", "architecture", "kernel", "boot_id")
    hostname, machine, kernel, boot = (words.one_line(survey.get(name) or words.UNKNOWN) for name in named)
    rows: Rows = [("", [line(f"{hostname}, {machine}, Linux {kernel}"), line(f"boot {boot[:8]}")])]
    rows += [("", _clock(survey, look))]
    free, total, disk = (number(survey.get(name)) for name in ("memory_available_bytes", "memory_total_bytes", "disk_free_bytes"))
    rows += [("", [line(f"memory {_size(free)} available of {_size(total)}"), line(f"disk {_size(disk)} free")])]
    devices = [words.one_line(each) for each in survey.get("accelerators") or []]
    if devices:
        driver = f", driver {words.one_line(survey['driver'])}" if survey.get("driver") else ""
        users = [_user(each) for each in survey.get("accelerator_users") or []]
        rows += [("", [line(f"{', '.join(devices)}{driver}"), line(f"used by {', '.join(users)}" if users else "nobody uses it")])]
    else:
        rows += [("", [line("no accelerator")])]
    return [*rows, ("", _traps(survey))]


def _clock(survey: Document, look: Document) -> list[Line]:
    skew, synchronised = number(look.get("skew_seconds")), survey.get("clock_synchronised")
    offset = timedelta(seconds=number(survey.get("utc_offset_seconds")) or 0.0)
    zone = f"UTC{'-' if offset < timedelta() else '+'}{abs(offset).seconds // 3600:02d}:{abs(offset).seconds % 3600 // 60:02d}"
    uncertain = number(look.get("skew_uncertainty_seconds")) or 0.0
    difference = "the coordinator's own clock" if skew is None else f"clock {skew:+.1f} s (± {uncertain:.1f} s)"
    state = {True: "synchronised", False: "not synchronised", None: "synchronised or not: unknown"}[synchronised]
    return [line(difference), line(state), line(zone)]


def _traps(survey: Document) -> list[Line]:
    traps = survey.get("traps") or {}
    user = f"user {words.one_line(traps.get('user') or words.UNKNOWN)}"
    lingers = {True: "lingers", False: "does not linger", None: "no logind"}[traps.get("is_lingering")]
    parts = [line(f"{user}, {lingers}")]
    pending = survey.get("reboot_pending")
    parts.append(line("no reboot pending" if pending is None else "a reboot is pending"))
    parts.append(line("files there are never cleaned" if not survey.get("cleaner") else "old files there are cleaned"))
    return parts


def _caps(look: Document) -> Rows:
    """Each mechanism of a cap on this host: how strongly it holds for this user, and by what means."""
    parts = sorted((look.get("caps") or {}).items())
    return [("", [line(f"{name}: {grade_words(part)}  ", quiet(words.one_line(part.get("means") or "")))]) for name, part in parts]


def _python(look: Document) -> Rows:
    python = look.get("python")
    if not python or python.get("fault"):
        return []
    torch = f"torch {words.one_line(python['torch'])}" if python.get("torch") else "no torch"
    packages = words.plural(len(python.get("packages") or {}), "package")
    read = ", every file read" if python.get("are_files_read") else ""
    program, version = words.one_line(python.get("program")), words.one_line(python.get("version"))
    return [("", [line(f"{program} is Python {version}"), line(torch), line(f"{packages}{read}")])]


def _environment(look: Document) -> Rows:
    """Whether the environment of the plan's lock is there, and from which Python it would be built."""
    source = look.get("source")
    if not source or source.get("fault"):
        return []
    version = words.one_line(source.get("version"))
    if not look.get("built"):
        return [("", [line("environment to be built"), line(f"{words.one_line(source.get('program'))} is Python {version}")])]
    return [("", [line(f"environment built from Python {words.one_line(each.get('python'))}"), line(words.plural(int(each["packages"]), "package")),
                  line(_size(number(each.get("bytes")))), line(quiet(words.one_line(each.get("name"))))]) for each in look["built"]]


def _displaced(look: Document) -> Rows:
    found = [each for each in look.get("displace") or [] if each.get("processes")]
    return [("", [line(f"makes room: {words.one_line(each.get('name'))}")]) for each in found]


def _user(each: Document) -> str:
    amount = _size(number(each.get("bytes")))
    ours = ", a run of ours" if each.get("is_ours") else ""
    return f"{words.one_line(each.get('name'))} (pid {each.get('pid')}, {words.one_line(each.get('user'))}, {amount}{ours})"


def _size(amount: float | None) -> str:
    return words.UNKNOWN if amount is None else show_size(int(amount))


def shown_looked(looked: Document) -> dict[str, Any]:
    """The document without what would drown the rest: every package of every interpreter."""
    looks = {}
    for name, look in (looked.get("looks") or {}).items():
        python = look.get("python")
        short = {**python, "packages": len(python.get("packages") or {})} if python else python
        looks[name] = {**look, "python": short}
    return {**looked, "looks": looks}


