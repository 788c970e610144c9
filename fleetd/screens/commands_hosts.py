"""Verbs about hosts, for an operator: `drain undrain fence clear takeover restore`.

The two that can't be taken back by their opposite, fence and takeover, say first exactly what they will do, and ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fleetd.screens import terminal, words
from fleetd.screens.document import find, find_campaign, is_host
from policies.errors import EXIT_ERROR, EXIT_OK, NotFound, PlanInvalid

RUNS_SHOWN_MAX = 12

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Because = Annotated[str, typer.Option(metavar="TEXT", help="Why, in your words: it stands in the history beside your name.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
Host = Annotated[str, typer.Argument(metavar="HOST", help="A host by its name in the plan.")]


def add_to(app: typer.Typer) -> None:
    for verb in (drain, undrain, fence, clear, takeover, restore):
        app.command()(verb)


def drain(host: Host, because: Because = "", as_json: AsJson = False) -> int:
    """Place no new run on a host. What runs there goes on."""
    with terminal.connect() as client:
        answer = client.wish("drain", host, terminal.actor(), because)
    if as_json:
        terminal.emit(answer)
        return EXIT_OK
    count = len(answer.get("runs") or [])
    goes_on = f"{words.plural(count, 'run')} there {'goes' if count == 1 else 'go'} on" if count else "nothing runs there"
    terminal.say(f"{host} takes no new run; {goes_on}\n  undo: fleetd undrain {host}")
    return EXIT_OK


def undrain(host: Host, because: Because = "", as_json: AsJson = False) -> int:
    """Let a drained host take new runs again."""
    with terminal.connect() as client:
        answer = client.wish("undrain", host, terminal.actor(), because)
    if as_json:
        terminal.emit(answer)
    else:
        terminal.say(f"{host} takes new runs again")
    return EXIT_OK


def clear(
    target: Annotated[str, typer.Argument(metavar="HOST|RUN", help="A stuck run, or a host with stuck runs.")], because: Because = "",
    as_json: AsJson = False,
) -> int:
    """Let a host take new runs although a run is stuck there. The stuck run keeps its memory and is never started beside its remains."""
    with terminal.connect() as client:
        document = client.status()
        chosen = target if is_host(document, target) else find(document, target).id
        answer = client.wish("clear", chosen, terminal.actor(), because)
    if as_json:
        terminal.emit(answer)
        return EXIT_OK
    hosts, count = ", ".join(answer.get("hosts") or []), len(answer.get("runs") or [])
    terminal.say(
        f"{hosts} takes new runs again, in the memory that {words.plural(count, 'stuck run')} leave{'s' if count == 1 else ''}\n"
        "  what is stuck is still killed every few seconds, and ends by itself once it can"
    )
    return EXIT_OK


def fence(host: Host, because: Because = "", yes: Yes = False, as_json: AsJson = False) -> int:
    """Say that a silent host is off: its lost runs go on elsewhere, as new runs from verified copies. Asks first."""
    with terminal.connect() as client:
        if not yes:
            would = client.wish("fence", host, terminal.actor(), because, dry_run=True)
            _confirm(_fence_words(would, done=False), f"fleetd fence {host} --yes", as_json)
        answer = client.wish("fence", host, terminal.actor(), because)
    if as_json:
        terminal.emit(answer)
    else:
        terminal.say(f"{_fence_words(answer, done=True)}\n  watch it: fleetd status")
    return EXIT_OK


def takeover(
    host: Host,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan that names the host, where none was launched here.")] = None,
    because: Because = "", yes: Yes = False, as_json: AsJson = False,
) -> int:
    """Make this coordinator the owner of a host that obeys another one. Asks first."""
    from fleetd.coordinator.daemon import ensure_running
    from fleetd.wire import encode

    more: dict[str, Any] = {}
    if plan is not None:
        more["host"] = encode(_host_in(plan, host))
        ensure_running(terminal.paths().root)
    with terminal.connect() as client:
        if not yes:
            seen = client.wish("takeover", host, terminal.actor(), because, dry_run=True, **more)
            _confirm(_takeover_words(seen), f"fleetd takeover {host}{f' --plan {plan}' if plan else ''} --yes", as_json)
        answer = client.wish("takeover", host, terminal.actor(), because, **more)
    if as_json:
        terminal.emit(answer)
    elif answer.get("restart_needed"):
        terminal.say(f"{host} obeys this coordinator from its next start on\n  now: fleetd daemon stop, then fleetd daemon start")
    else:
        terminal.say(f"{host} obeys this coordinator now\n  see what is there: fleetd status")
    return EXIT_OK


def restore(
    campaign: Annotated[str, typer.Argument(metavar="CAMPAIGN")],
    host: Annotated[str, typer.Option(metavar="HOST", help="Only what was displaced on this host.")] = "",
    now: Annotated[bool, typer.Option("--now", help="Also while runs are still at work there.")] = False,
    leave: Annotated[bool, typer.Option("--leave", help="It stays away for good: nothing is started, and nobody is told of it any more.")] = False,
    because: Because = "", as_json: AsJson = False,
) -> int:
    """Bring back what a campaign has displaced, in the reverse order. What runs already is recognised; nothing is started twice."""
    with terminal.connect() as client:
        found = find_campaign(client.status(), campaign)
        answer = client.wish("restore", str(found["campaign_id"]), terminal.actor(), because, host=host, now=now, leave=leave)
    items = list(answer.get("displaced") or [])
    if as_json:
        terminal.emit(answer)
    for each in () if as_json else reversed(items):
        terminal.say(f"{words.one_line(each.get('name'))} on {words.one_line(each.get('host'))}: {_restored_words(each)}")
    return EXIT_OK if all(each.get("state") in ("restored", "found", "left") for each in items) else EXIT_ERROR


def _restored_words(each: dict[str, Any]) -> str:
    state, detail = each.get("state"), words.one_line(each.get("detail") or "")
    if state == "left":
        return f"it stays away: {detail}"
    if state == "found":
        return "it was never touched"
    if state == "restoring":
        return f"not back yet, it goes on by itself: {detail}   (watch it: fleetd status)"
    return f"{'RESTORED' if state == 'restored' else 'NOT RESTORED'}: {detail}"


def _confirm(text: str, command: str, as_json: bool) -> None:
    """Show what will happen and ask. Without a terminal nobody can be asked: that needs --yes."""
    if as_json or not terminal.is_live():
        raise PlanInvalid("nobody is there to be asked", where=command.removesuffix(" --yes"), what=" ".join(text.split()), fix=command)
    terminal.say(text, talk=True)
    if not typer.confirm("do it?", default=False, err=True):
        raise typer.Abort


def _fence_words(answer: dict[str, Any], *, done: bool) -> str:
    """Exactly what a fence does, run by run."""
    host, found = words.one_line(answer.get("host")), list(answer.get("runs") or [])
    warning = f"{host} has been silent since {answer.get('silent_since')}. Fence it only if it is off. Then:"
    lines = [f"{host} is fenced" if done else warning]
    for each in found[:RUNS_SHOWN_MAX]:
        lines.append(f"  {words.one_line(each.get('candidate'))}  {_fate_words(each)}")
    if len(found) > RUNS_SHOWN_MAX:
        lines.append(f"  and {len(found) - RUNS_SHOWN_MAX} more")
    if not found:
        lines.append("  it holds no run that is not over")
    lines.append("  when it answers again, what is left of these there is ended before anything else; none is ever started there again")
    return "\n".join(lines)


def _fate_words(each: dict[str, Any]) -> str:
    if not each.get("goes_on"):
        return words.one_line(each.get("because") or each.get("becomes"))
    start = "from its beginning (no verified copy lies here)" if each.get("from_step") is None else f"from step {each['from_step']}, a verified copy"
    hosts = [words.one_line(name) for name in each.get("hosts") or []]
    where = f"on {' or '.join(hosts)}" if hosts else "once a host of its plan answers: the plan names no other"
    name = f" as {words.one_line(each['successor'])}" if each.get("successor") else " as a new run"
    return f"goes on{name} {start}, {where}"


def _takeover_words(seen: dict[str, Any]) -> str:
    owner, found = seen.get("owner"), list(seen.get("runs") or [])
    said = "nobody" if not owner else f"coordinator {owner.get('coordinator_id')}, generation {owner.get('generation')}"
    lines = [f"{words.one_line(seen.get('host'))} ({words.one_line(seen.get('root'))}) obeys {said}."]
    if seen.get("is_ours"):
        lines.append("  that is a later life of this very coordinator: take it over only if that one is gone for good, as after a restore")
    else:
        lines.append("  from then on that one is refused there; take it over only if it is gone for good, or is to give this host up")
    for each in found[:RUNS_SHOWN_MAX]:
        state = words.one_line(each.get("state") or words.UNKNOWN)
        lines.append(f"  at work there: {words.one_line(each.get('run_id'))}, {state}: goes on, is shown, can be stopped")
    return "\n".join(lines)


def _host_in(path: Path, name: str) -> Any:
    from fleetd.plan import load_plan

    found = load_plan(path).plan
    for host in found.hosts:
        if host.name == name:
            return host
    names = ", ".join(host.name for host in found.hosts)
    raise NotFound(f"the plan has no host {name!r}", where=str(path), what=f"its hosts: {names}", fix=f"fleetd check {path}")


