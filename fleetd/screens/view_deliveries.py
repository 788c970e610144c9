"""Trees on their way to hosts, as one line or one bar each: how far, how quick, how long still, by which road and why. Pure."""

from __future__ import annotations

from fleetd.screens import layout, words
from fleetd.screens.document import Document, number
from fleetd.screens.layout import Line, Span, line, quiet

DIGEST_SHOWN = 12


def deliveries_of(document: Document) -> list[tuple[str, Document]]:
    """Every delivery under way with the name of its host."""
    hosts = document.get("hosts") or []
    return [(words.one_line(host.get("name") or words.UNKNOWN), each) for host in hosts for each in host.get("deliveries") or []]


def delivery_line(delivery: Document) -> Line:
    """`datasets 3f2a9c1b04de: 1.20/4.00 GiB · 210 MiB/s · 13 s left · by ssh, it is large: 4096 MiB`."""
    parts = [line(quiet(f"{name_of(delivery)}: "), *progress_of(delivery)), *_pace(delivery)]
    if delivery.get("road"):
        parts.append(line(quiet(f"by {words.one_line(delivery['road'])}, {words.one_line(delivery.get('because') or '')}")))
    return layout.packed(parts, width=10_000, hanging=0)[0]


def name_of(delivery: Document) -> str:
    return words.one_line(f"{delivery.get('kind') or words.UNKNOWN} {str(delivery.get('digest') or words.UNKNOWN)[:DIGEST_SHOWN]}")


def progress_of(delivery: Document) -> Line:
    """How far it is; before anything moves, what is read over there."""
    if delivery.get("phase") == "looking":
        return line("looking what is there", quiet(f", {words.size(number(delivery.get('bytes_read')))} read"))
    share = words.share(number(delivery.get("bytes")), number(delivery.get("bytes_total")))
    kept = number(delivery.get("bytes_there_before"))
    return line(Span(share), quiet(f" ({words.size(kept)} from an earlier try)" if kept else ""))


def _pace(delivery: Document) -> list[Line]:
    if delivery.get("phase") == "settling":
        return [line("the last bytes go to its disk")]
    if delivery.get("phase") != "sending":
        return []
    rate = number(delivery.get("bytes_per_second"))
    found = [line(f"{words.size(rate)}/s")] if rate is not None else []
    left = number(delivery.get("seconds_left"))
    return [*found, line(f"{words.duration(left)} left")] if left is not None else found
