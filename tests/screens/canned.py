"""Status documents as docs/ARCHITECTURE.md describes them, for the tests of the screens: one fleet in several situations."""

from __future__ import annotations

import copy
from typing import Any

GIB = 1024**3
AT = "2026-11-30T12:00:00.000000Z"
CAMPAIGN = "20261130T114000Z-manpages"


def known(value: Any, age_seconds: float | None = 1.0) -> dict[str, Any]:
    return {"value": value, "age_seconds": age_seconds}


def run(candidate: str, **changes: Any) -> dict[str, Any]:
    """A healthy training run; every key of the contract is there."""
    parts = {
        "cgroup": {"grade": "enforced", "means": "cgroup v1 /fleetd/run"},
        "sampler": {"grade": "sampled", "means": "RssAnon + RssShmem each second"},
        "allocator": {"grade": "absent", "means": "no accelerator"},
        "floor": {"grade": "sampled", "means": "MemAvailable above 1.00 GiB"},
    }
    body = {
        "run_id": f"20261130T114000Z-manpages-{candidate}",
        "campaign_id": CAMPAIGN,
        "candidate": candidate,
        "kind": "train",
        "host": "gx10",
        "state": "running",
        "reason": None,
        "detail": "",
        "since": "2026-11-30T11:41:00.000000Z",
        "want": "run",
        "attempt": 1,
        "attempts_ended": [],
        "restarts_used": 0,
        "restarts_max": 5,
        "pid": known(4711),
        "identity": known("verified"),
        "step": known(123),
        "steps_planned": 400,
        "last_step_at": known("2026-11-30T11:59:59.000000Z"),
        "steps_per_second": known(2.134),
        "loss": known(5.2314),
        "memory": {
            "host_bytes": known(int(1.2 * GIB)),
            "accelerator_bytes": known(None, None),
            "host_peak_bytes": known(int(1.31 * GIB)),
            "host_cap_bytes": 2 * GIB,
            "accelerator_cap_bytes": 2 * GIB,
            "parts": parts,
        },
        "checkpoint": {"step": 100, "digest": "ab" * 32, "verified_at": "2026-11-30T11:59:40.000000Z", "age_seconds": 20.0},
        "checkpoint_on_host": known({"step": 100, "digest": "ab" * 32}, 22.0),
        "best": known({"step": 100, "value": 5.1042}, 130.0),
        "stop_at": "2026-11-30T12:58:00.000000Z",
        "cutoff_at": "2026-11-30T13:00:00.000000Z",
        "final_at": "2026-11-30T13:15:00.000000Z",
        "time_left_seconds": 3480.0,
        "next_attempt_at": None,
        "alarms": [],
        "selectable": True,
    }
    return {**body, **changes}


def waiting(candidate: str, **changes: Any) -> dict[str, Any]:
    """A run that no host has started yet: nothing is measured."""
    nothing = {
        key: known(None, None) for key in ("pid", "identity", "step", "last_step_at", "steps_per_second", "loss", "checkpoint_on_host", "best")
    }
    memory = {
        "host_bytes": known(None, None),
        "accelerator_bytes": known(None, None),
        "host_peak_bytes": known(None, None),
        "host_cap_bytes": 2 * GIB,
        "accelerator_cap_bytes": 2 * GIB,
        "parts": {},
    }
    return run(
        candidate,
        **{
            "state": "queued",
            "host": None,
            "attempt": 0,
            **nothing,
            "memory": memory,
            "checkpoint": None,
            "restarts_used": 0,
            "stop_at": None,
            "selectable": "no validation predictions yet",
            **changes,
        },
    )


def host(name: str, **changes: Any) -> dict[str, Any]:
    body = {
        "name": name,
        "reachable": True,
        "since": "2026-11-30T11:40:00.000000Z",
        "boot_id": "b" * 8,
        "detail": "",
        "age_seconds": 0.8,
        "facts": None,
        "memory_available_bytes": known(int(3.1 * GIB), 0.8),
        "disk_free_bytes": known(40 * GIB, 0.8),
        "committed_bytes": 6 * GIB,
        "capacity_bytes": 8 * GIB,
    }
    return {**body, **changes}


def delivery(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "datasets", "digest": "ab" * 32, "phase": "sending", "road": "ssh", "because": "it is large: 4096 MiB", "bytes": 3 * 1024**3,
        "bytes_total": 4 * 1024**3, "bytes_there_before": 0, "bytes_read": 0, "bytes_per_second": 100.0 * 1024**2, "seconds": 31.0,
        "seconds_left": 10.24, **changes,
    }


def campaign(run_ids: list[str], **changes: Any) -> dict[str, Any]:
    body = {
        "campaign_id": CAMPAIGN,
        "name": "manpages",
        "stage": "training",
        "detail": "",
        "since": "2026-11-30T11:41:00.000000Z",
        "launched_at": "2026-11-30T11:40:00.000000Z",
        "deadline_at": "2026-11-30T13:15:00.000000Z",
        "cutoff_at": "2026-11-30T13:00:00.000000Z",
        "last_safe_stop_at": "2026-11-30T12:58:00.000000Z",
        "is_over": False,
        "seconds_to_deadline": 4500.0,
        "seconds_to_last_safe_stop": 3480.0,
        "runs": run_ids,
        "selection": None,
        "frozen": None,
        "openings": [],
        "results": {},
        "report": None,
        "directory": "/state/campaigns/c",
    }
    return {**body, **changes}


def document(
    *, runs: list[dict[str, Any]], verdict: dict[str, Any] | None = None, hosts: list[dict[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "schema": 1,
            "at": AT,
            "coordinator": {
                "pid": 99,
                "id": "c0ffee",
                "generation": 3,
                "started_at": "2026-11-30T11:39:00.000000Z",
                "state_dir": "/state",
                "journal": "ok",
            },
            "verdict": verdict or {"word": "OK", "text": "3 runs at work", "since": "2026-11-30T11:41:00.000000Z"},
            "campaigns": [campaign([each["run_id"] for each in runs], **changes)] if runs else [],
            "runs": runs,
            "hosts": hosts if hosts is not None else [host("gx10")],
        }
    )


def training() -> dict[str, Any]:
    return document(
        runs=[
            run("lr-high"),
            run("lr-mid", step=known(118), loss=known(5.402), best=known(None, None), checkpoint=None),
            waiting("lr-low", detail="waits for memory: gx10 has 2.00 GiB free of 8.00 GiB, the run needs 2.50 GiB"),
        ]
    )


def trouble() -> dict[str, Any]:
    """A held run, a silent host with a lost run, one in backoff, one that can't be verified."""
    old = 184.0
    lost = run(
        "lost-one",
        host="spark-a",
        state="lost",
        detail="spark-a has not answered for 3 min",
        pid=known(4711, old),
        identity=known("verified", old),
        step=known(90, old),
        loss=known(5.9, old),
        steps_per_second=known(1.9, old),
        last_step_at=known("2026-11-30T11:56:55.000000Z", old + 1),
    )
    lost["memory"] = {**lost["memory"], "host_bytes": known(GIB, old)}
    held = run(
        "held-one", state="held", reason="exit_nonzero", detail="5 of 5 restarts used in 1 h, exit 1 each time", restarts_used=5, pid=known(None, 1.0)
    )
    backoff = run("again", state="backoff", reason="signal", restarts_used=1, next_attempt_at="2026-11-30T12:00:08.000000Z")
    stranger = run(
        "stranger",
        identity=known("cannot verify: start ticks 900 recorded, 1200 found"),
        alarms=["memory at 96 % of the cap: asked to save and stop"],
    )
    return document(
        runs=[lost, held, backoff, stranger],
        verdict={"word": "NEEDS YOU", "text": "held-one is held on gx10: 5 of 5 restarts used", "since": "2026-11-30T11:48:00.000000Z"},
        hosts=[
            host("gx10"),
            host(
                "spark-a",
                reachable=False,
                since="2026-11-30T11:56:56.000000Z",
                detail="no answer on the channel",
                age_seconds=old,
                memory_available_bytes=known(90 * GIB, old),
                disk_free_bytes=known(900 * GIB, old),
                capacity_bytes=110 * GIB,
            ),
        ],
    )


def evaluated() -> dict[str, Any]:
    settled = {
        "state": "finished",
        "steps_per_second": known(None, None),
        "pid": known(None, None),
        "step": known(400, 700.0),
        "since": "2026-11-30T11:48:00.000000Z",
        "last_step_at": known("2026-11-30T11:48:00.000000Z", 720.0),
    }
    runs = [
        run(
            "lr-high",
            **settled,
            best=known({"step": 400, "value": 4.812}, 720.0),
            checkpoint={"step": 400, "digest": "ab" * 32, "verified_at": AT, "age_seconds": 700.0},
        ),
        run("lr-mid", **settled),
        run("plain", **settled, selectable="it wrote no validation predictions"),
        run(
            "evaluate-test",
            **{
                **settled,
                "kind": "evaluate",
                "step": known(None, None),
                "steps_planned": None,
                "best": known(None, None),
                "loss": known(None, None),
                "checkpoint": None,
            },
        ),
    ]
    table = [
        {
            "run_id": runs[0]["run_id"],
            "candidate": "lr-high",
            "step": 0,
            "value": 9.01,
            "eligible": True,
            "because": "the unchanged base, the first incumbent",
        },
        {
            "run_id": runs[0]["run_id"],
            "candidate": "lr-high",
            "step": 400,
            "value": 4.812,
            "eligible": True,
            "because": "better than step 300 by 0.040000; chosen, the lowest of 2",
        },
        {
            "run_id": runs[1]["run_id"],
            "candidate": "lr-mid",
            "step": 400,
            "value": 5.013,
            "eligible": True,
            "because": "better than step 300 by 0.051000; the best of its run, lr-high is lower",
        },
        {
            "run_id": runs[2]["run_id"],
            "candidate": "plain",
            "step": None,
            "value": None,
            "eligible": False,
            "because": "it wrote no validation predictions",
        },
    ]
    looks = {
        "selected": {"de": 5.9, "en": 6.1, "fr": 5.95, "ja": 6.4},
        "base": {"de": 9.05, "en": 9.02, "fr": 9.1, "ja": 9.01},
        "unigram": {"de": 6.79, "en": 6.96, "fr": 7.18, "ja": 7.55},
    }
    result = {
        "rows": 114,
        "exploratory": False,
        "models": {
            who: {"nll": sum(families.values()) / 4, "families": {family: {"nll": nats} for family, nats in families.items()}}
            for who, families in looks.items()
        },
    }
    return document(
        runs=runs,
        verdict={"word": "OK", "text": "manpages is evaluated", "since": AT},
        stage="evaluated",
        is_over=True,
        since="2026-11-30T11:50:00.000000Z",
        selection={"run_id": runs[0]["run_id"], "candidate": "lr-high", "step": 400, "checkpoint_digest": "ab" * 32, "value": 4.812, "table": table},
        frozen={"sha256": "cd" * 32, "at": "2026-11-30T11:49:00.000000Z"},
        openings=[{"split": "test", "at": "2026-11-30T11:49:10.000000Z"}],
        results={"test": result},
        report="/state/campaigns/c/report.html",
    )
