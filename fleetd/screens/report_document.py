"""report.json: everything that the report says, as plain values, from the status document and the campaign's directory.

The files rule over the status document where both tell the same; report.html shows nothing that is not in here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleetd.paths import CampaignPaths
from fleetd.plan_units import show_duration
from fleetd.screens import words
from fleetd.screens.document import SETTLED_STATES, Document, campaigns, runs_of
from fleetd.screens.document import number as shown_number
from fleetd.screens.report_files import LedgerSight, Missing, group, number, read_ledger, record
from fleetd.screens.report_runs import moment, run_facts
from policies.errors import NotFound
from policies.token_nll import perplexity

MODELS = ("selected", "base", "unigram")
HOST_FACTS = ("hostname", "kernel", "python", "architecture", "cpu_count", "memory_total_bytes", "accelerators")
OVER_STAGES = frozenset({"evaluated", "finished", "failed"})


def report_document(paths: CampaignPaths, document: Document) -> dict[str, Any]:
    """The report of the campaign that lies at `paths`. NotFound when the status document does not know it."""
    campaign = _campaign(paths, document)
    missing = Missing()
    runs = [run_facts(run, paths.store_run(run["run_id"]), missing) for run in runs_of(document, campaign["campaign_id"])]
    selection = _selection(paths, campaign, missing)
    ledger = read_ledger(paths.ledger, missing)
    runs.sort(key=lambda run: run["kind"] != "train")
    found = {
        "schema": 1, "written_at": document.get("at"), "campaign_id": campaign["campaign_id"], "name": campaign.get("name"),
        "stage": campaign.get("stage"), "detail": campaign.get("detail") or "", "times": _times(campaign, runs, ledger), "runs": runs,
        "selection": selection, "frozen": _frozen(paths, campaign, missing), "results": _results(paths, campaign, missing),
        "ledger": _ledger(ledger), "provenance": _provenance(paths, document, campaign, selection, missing),
    }
    found["verdict"] = verdict(found)
    found["headlines"] = headlines(found)
    found["missing"] = missing.notes
    return found


def _campaign(paths: CampaignPaths, document: Document) -> Document:
    wanted = paths.root.name
    for campaign in campaigns(document):
        if campaign.get("campaign_id") == wanted:
            return campaign
    what, fix = "the coordinator does not know it", "fleetd status   (shows every name)"
    raise NotFound(f"no campaign {wanted!r}", where=str(paths.root), what=what, fix=fix)


def _selection(paths: CampaignPaths, campaign: Document, missing: Missing) -> dict[str, Any] | None:
    over = campaign.get("stage") in OVER_STAGES
    absent = f"there is no selection.json: {campaign.get('detail') or 'nothing was chosen'}" if over else "the trainings are not over"
    stored = record(paths.selection, "selection", missing, absent=None)
    found = stored if stored is not None else campaign.get("selection")
    if not isinstance(found, dict):
        missing.add("selection", absent)
        return None
    if stored is None and not paths.selection.exists():
        missing.add("selection", "selection.json is gone; the table is what the coordinator remembers")
    table = [_table_row(row, found) for row in found.get("table") or [] if isinstance(row, dict)]
    values = {key: number(found.get(key)) for key in ("value", "base_value", "minimum_improvement")}
    keys = ("outcome", "because", "criterion", "run_id", "candidate", "step", "checkpoint_digest", "base_checkpoint_digest", "at")
    return {**{key: found.get(key) for key in keys}, **values, "table": table}


def _table_row(row: dict[str, Any], selection: dict[str, Any]) -> dict[str, Any]:
    step = row.get("step")
    chosen = step is not None and (row.get("run_id"), step) == (selection.get("run_id"), selection.get("step"))
    return {
        "run_id": row.get("run_id"), "candidate": row.get("candidate"), "step": step, "value": number(row.get("value")),
        "perplexity": _perplexity(row.get("value")), "eligible": bool(row.get("eligible")), "because": str(row.get("because") or ""),
        "checkpoint_digest": row.get("checkpoint_digest"), "chosen": chosen,
    }


def _frozen(paths: CampaignPaths, campaign: Document, missing: Missing) -> dict[str, Any] | None:
    absent = "nothing is frozen, so no reserved data was opened"
    stored = record(paths.frozen, "freeze", missing, absent=absent if not campaign.get("frozen") else "frozen.json is gone")
    known = group(campaign.get("frozen"))
    if stored is None:
        return dict(known) or None
    keys = ("candidate", "step", "checkpoint_digest", "base_checkpoint_digest", "value", "base_value", "code_digest", "inputs")
    return {"sha256": known.get("sha256"), "at": stored.get("frozen_at") or known.get("at"), **{key: stored.get(key) for key in keys}}


def _results(paths: CampaignPaths, campaign: Document, missing: Missing) -> list[dict[str, Any]]:
    """Every look at a reserved split, in order of judging; the headline of the status document where a file is gone."""
    found = []
    for path in sorted(paths.results.glob("*.json")) if paths.results.is_dir() else []:
        stored = record(path, f"result {path.stem}", missing, absent="it is gone")
        if stored is not None:
            found.append(_result(stored, str(stored.get("split") or path.stem)))
    for split, headline in group(campaign.get("results")).items():
        if isinstance(headline, dict) and split not in {result["split"] for result in found}:
            missing.add(f"result on {split}", f"results/{split}.json is gone; the figures are those that the coordinator remembers")
            found.append(_result(headline, str(split)))
    if not found:
        missing.add("figures on reserved data", "no reserved split was judged")
    return sorted(found, key=lambda result: (str(result["judged_at"] or ""), result["split"]))


def _result(stored: dict[str, Any], split: str) -> dict[str, Any]:
    models = group(stored.get("models")) or stored
    figures = {who: _figures(models[who]) for who in MODELS if isinstance(models.get(who), dict)}
    names = sorted({family for each in figures.values() for family in each["families"]})
    families = []
    for name in names:
        row = {who: figures[who]["families"].get(name) for who in figures}
        families.append({
            "family": name, **{who: _perplexity(row.get(who)) for who in MODELS}, "of_unigram": _ratio(row, "selected", "unigram"),
            "of_base": _ratio(row, "selected", "base"), "tokens": _counted(models, name, "tokens"), "rows": _counted(models, name, "rows"),
        })
    value = {who: figures[who]["value"] for who in figures}
    return {
        "split": split, "look": stored.get("look", 1), "exploratory": bool(stored.get("exploratory")), "because": stored.get("because") or "",
        "rows": stored.get("rows"), "numeric_mode": stored.get("numeric_mode"), "judged_at": stored.get("judged_at"),
        "frozen_sha256": stored.get("frozen_sha256"), "inputs": stored.get("inputs") or {}, "nats": value,
        "perplexity": {who: _perplexity(value.get(who)) for who in MODELS}, "families": families,
        "of_unigram": _ratio(value, "selected", "unigram"), "of_base": _ratio(value, "selected", "base"),
    }


def _figures(model: dict[str, Any]) -> dict[str, Any]:
    """Nats per token over all and by family, from a result file (`nll`) or a headline (`value`)."""
    families = {str(name): number(each.get("nll") if isinstance(each, dict) else each) for name, each in group(model.get("families")).items()}
    return {"value": number(model.get("nll", model.get("value"))), "families": families}


def _counted(models: dict[str, Any], family: str, key: str) -> int | None:
    for who in MODELS:
        count = group(group(group(models.get(who)).get("families")).get(family)).get(key)
        if isinstance(count, int):
            return count
    return None


def _perplexity(nats: Any) -> float | None:
    value = number(nats)
    return None if value is None or not math.isfinite(perplexity(value)) else perplexity(value)


def _ratio(nats: dict[str, Any], above: str, below: str) -> float | None:
    """Perplexity of one over perplexity of the other."""
    first, second = nats.get(above), nats.get(below)
    return None if first is None or second is None else _perplexity(first - second)


def _times(campaign: Document, runs: Sequence[dict[str, Any]], ledger: LedgerSight | None) -> dict[str, Any]:
    """The moments of the campaign, and how much room was left at each line."""
    trained = [run for run in runs if run["kind"] == "train"]
    over = all(run["state"] in SETTLED_STATES for run in trained)
    training_ends = [each["at"] for run in trained for each in run["attempts"] if moment(each["at"])] if over else []
    entries = ledger.entries if ledger else ()
    rests = campaign.get("stage") == "frozen" and all(run["state"] in SETTLED_STATES for run in runs)
    ended = campaign.get("since") if rests or campaign.get("stage") in OVER_STAGES else None
    times: dict[str, Any] = {
        "launched_at": campaign.get("launched_at"), "training_ended_at": max(training_ends, default=None), "cutoff_at": campaign.get("cutoff_at"),
        "ended_at": ended, "deadline_at": campaign.get("deadline_at"),
        "marks": [
            {"name": _mark(entry["event"]), "at": entry.get("at")} for entry in entries
            if entry["event"].get("kind") in ("frozen", "opened", "judged") and moment(entry.get("at"))
        ],
    }
    named = [
        ("launched", times["launched_at"]), ("training ended", times["training_ended_at"]), ("training cutoff", times["cutoff_at"]),
        *((mark["name"], mark["at"]) for mark in times["marks"]), ("ended", ended), ("deadline", times["deadline_at"]),
    ]
    known = [(name, text) for name, text in named if moment(text) is not None]
    known.sort(key=lambda each: str(each[1]))
    times["table"] = [{"name": name, "at": text, "seconds_after_launch": _between(times["launched_at"], text)} for name, text in known]
    times["seconds_before_cutoff"] = _between(times["training_ended_at"], times["cutoff_at"])
    times["seconds_before_deadline"] = _between(ended, times["deadline_at"])
    times["seconds_in_all"] = _between(times["launched_at"], ended)
    times["seconds_allowed"] = _between(times["launched_at"], times["deadline_at"])
    return times


def _mark(event: dict[str, Any]) -> str:
    return "frozen" if event.get("kind") == "frozen" else f"{event.get('split')} {event.get('kind')}"


def _between(first: Any, second: Any) -> float | None:
    start, end = moment(first), moment(second)
    return None if start is None or end is None else (end - start).total_seconds()


def _ledger(ledger: LedgerSight | None) -> dict[str, Any] | None:
    if ledger is None:
        return None
    entries = [
        {"sequence": entry.get("sequence"), "at": entry.get("at"), "kind": entry["event"].get("kind"), "actor": entry["event"].get("actor"),
         "text": _entry_words(entry["event"]), "hash": entry.get("hash")}
        for entry in ledger.entries
    ]
    return {"chain": ledger.chain, "order": list(ledger.order), "entries": entries, "head": entries[-1]["hash"] if entries else None}


def _entry_words(event: dict[str, Any]) -> str:
    kind, split = event.get("kind"), event.get("split")
    if kind == "registered":
        sealed = group(event.get("splits"))
        return "the data of every role by digest" + (f"; held back until the freeze: {', '.join(sorted(sealed))}" if sealed else "")
    if kind == "frozen":
        return f"selection {_short(event.get('frozen_sha256'))}, checkpoint {_short(event.get('checkpoint_digest'))}"
    if kind == "opened":
        because = f": {event['because']}" if event.get("because") else ""
        return f"{split}, look {event.get('number')}, for selection {_short(event.get('frozen_sha256'))}{because}"
    if kind == "judged":
        return f"{split}, look {event.get('number')}, result {_short(event.get('results_sha256'))}"
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("kind", "actor"))


def _short(digest: Any) -> str:
    return str(digest or words.UNKNOWN)[:12]


def _provenance(
    paths: CampaignPaths, document: Document, campaign: Document, selection: dict[str, Any] | None, missing: Missing,
) -> dict[str, Any]:
    """Digests of what went in, and the software and devices that the chosen checkpoint was made with."""
    digests: dict[str, str] = {}
    code: set[str] = set()
    ledger = read_ledger(paths.ledger, Missing())
    for entry in ledger.entries if ledger else ():
        code.add(str(entry.get("code")))
        if entry["event"].get("kind") == "registered":
            digests |= {str(key): str(value) for key, value in group(entry["event"].get("digests")).items()}
    environment: dict[str, Any] = {}
    digest = (selection or {}).get("checkpoint_digest")
    if digest:
        state = record(
            paths.store_checkpoints / str(digest) / "trainer.json", "software of the chosen checkpoint", missing,
            absent="no copy of the chosen checkpoint is in the store",
        )
        environment = dict(group((state or {}).get("environment")))
    used = {run.get("host") for run in runs_of(document, campaign["campaign_id"])}
    hosts = [
        {"name": host.get("name"), **{key: group(host.get("facts")).get(key) for key in HOST_FACTS}}
        for host in document.get("hosts") or [] if host.get("name") in used
    ]
    coordinator = group(document.get("coordinator")).get("id")
    return {"data": digests, "code": sorted(code), "environment": environment, "hosts": hosts, "coordinator": coordinator}


def verdict(found: dict[str, Any]) -> dict[str, str]:
    """The whole report in one line, and the word it begins with."""
    stage, selection, results = str(found["stage"]), found["selection"], found["results"]
    chosen = f"{selection['candidate']} at step {selection['step']}" if selection and selection["step"] is not None else None
    if stage == "failed" or (selection and chosen is None):
        because = (selection or {}).get("because") or found["detail"] or "no reason was recorded"
        return {"word": "No model", "text": f"Nothing was chosen: {because}"}
    if results and chosen:
        last = results[-1]
        after, before = last["perplexity"].get("selected"), last["perplexity"].get("base")
        figures = f"perplexity {_ppl(after)}, the unchanged base {_ppl(before)}"
        above = not_below_unigram(last)
        figures += f"; not below the unigram model in {', '.join(above)}" if above else ""
        return {"word": "Done", "text": f"{chosen} was chosen, frozen, and judged on {last['split']}: {figures}"}
    if chosen and found["frozen"]:
        return {"word": "Frozen", "text": f"{chosen} was chosen and frozen; no reserved data has been judged"}
    if chosen:
        return {"word": "Chosen", "text": f"{chosen} was chosen; the choice is not frozen"}
    return {"word": stage.capitalize(), "text": f"The campaign is {stage}" + (f": {found['detail']}" if found["detail"] else "")}


def _ppl(value: float | None) -> str:
    return words.UNKNOWN if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def headlines(found: dict[str, Any]) -> list[dict[str, str]]:
    """The few figures that a person looks for first."""
    cards: list[dict[str, str]] = []
    selection, times = found["selection"], found["times"]
    if selection and selection["step"] is not None:
        note = f"perplexity {_ppl(_perplexity(selection['value']))}, base {_ppl(_perplexity(selection['base_value']))}"
        cards.append({"label": "validation, nats per token", "value": words.loss(selection["value"]), "note": note})
    for result in found["results"]:
        after = result["perplexity"]
        note = f"base {_ppl(after.get('base'))}, unigram {_ppl(after.get('unigram'))}; mean over languages"
        cards.append({"label": f"{result['split']} perplexity", "value": _ppl(after.get("selected")), "note": note})
        cards += _against_unigram(result)
    if times["seconds_in_all"] is not None:
        left = times["seconds_before_deadline"]
        note = "" if left is None else f"{show_duration(abs(left))} {'before' if left >= 0 else 'after'} the deadline"
        cards.append({"label": "time", "value": show_duration(times["seconds_in_all"]), "note": note})
    peaks = [run for run in found["runs"] if run["host_peak_bytes"] and run["host_cap_bytes"]]
    if peaks:
        nearest = max(peaks, key=lambda run: run["host_peak_bytes"] / run["host_cap_bytes"])
        share = nearest["host_peak_bytes"] / nearest["host_cap_bytes"]
        note = f"{share:.0%} of the cap {words.size(shown_number(nearest['host_cap_bytes']))}, {nearest['candidate']}"
        cards.append({"label": "highest memory", "value": words.size(nearest["host_peak_bytes"]), "note": note})
    return cards


def not_below_unigram(result: dict[str, Any]) -> list[str]:
    """Languages in which the selected model is no better than counting words."""
    return [row["family"] for row in result["families"] if row["of_unigram"] is not None and row["of_unigram"] >= 1]


def _against_unigram(result: dict[str, Any]) -> list[dict[str, str]]:
    ratios = {row["family"]: row["of_unigram"] for row in result["families"] if row["of_unigram"] is not None}
    if not ratios:
        return []
    above = not_below_unigram(result)
    low, high = min(ratios.values()), max(ratios.values())
    note = f"not below in {', '.join(above)}" if above else f"below the unigram model in all {len(ratios)} languages"
    value = f"{low:.2f} to {high:.2f} ×" if f"{low:.2f}" != f"{high:.2f}" else f"{low:.2f} ×"
    return [{"label": "of the unigram model's", "value": value, "note": note}]
