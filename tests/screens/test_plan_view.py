"""What `fleetd check` shows of a plan, and of what its hosts showed."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from fleetd.plan import LoadedPlan, load_plan
from fleetd.screens import layout
from fleetd.screens.host_checks import faults_of, look_at_hosts
from fleetd.screens.plan_view import check_document, render_check
from policies.facts import GIB

ROOT = Path(__file__).resolve().parents[2]
MANPAGES = ROOT / "examples" / "manpages" / "plan.yaml"
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=timezone.utc)


def shown(loaded: LoadedPlan, width: int = 120) -> str:
    return layout.painted(render_check(loaded, NOW, width=width), colour=False)


def plan_of(folder: Path, *, host: str = "root: host", candidate: str = "command: [echo]", extra: str = "") -> LoadedPlan:
    path = folder / "plan.yaml"
    path.write_text(f"name: p\ndeadline: 3h\nhosts:\n  box: {{{host}}}\n{extra}candidates:\n  one: {{{candidate}}}\n", encoding="utf-8")
    return load_plan(path, now=NOW)


def test_the_check_says_when_training_would_end_and_how_the_caps_add_up() -> None:
    text = shown(load_plan(MANPAGES, now=NOW))
    assert "2026-11-30 09:27:00 UTC" in text and "2026-11-30 09:30:00 UTC" in text
    assert "6 GiB − 1 GiB floor = 5 GiB for runs; slow 1.5 GiB + middle 1.5 GiB + fast 1.5 GiB = 4.5 GiB: all run at once" in " ".join(text.split())
    assert "10 shards, 2,381 documents, 4,739,410 tokens" in text
    assert "sealed until the freeze" in text


def test_each_value_stands_beside_the_line_it_came_from_and_what_differs_comes_by_itself() -> None:
    lines = shown(load_plan(MANPAGES, now=NOW)).split("\n")
    source = MANPAGES.read_text(encoding="utf-8").split("\n")
    line_of_slow = next(number for number, text in enumerate(source, 1) if text.strip().startswith("slow:"))
    differs = next(text for text in lines if text.strip().startswith("training.optimizer.lr"))
    assert f"slow 0.002  (line {line_of_slow})" in differs and "fast 0.012" in differs
    assert any(text.split() == ["training.log_every", "1", "·", "(default)"] for text in lines)


SEEN: dict[str, Any] = {
    "looks": {"box": {
        "survey": {
            "hostname": "spark-a", "architecture": "aarch64", "kernel": "6.14", "boot_id": "b00t" * 4, "utc_offset_seconds": -3600,
            "clock_synchronised": True, "memory_total_bytes": 128 * GIB, "memory_available_bytes": 40 * GIB, "disk_free_bytes": 900 * GIB,
            "accelerators": ["NVIDIA GB10"], "driver": "580.1", "accelerator_users": [{"pid": 7, "name": "vllm", "user": "bob", "bytes": 60 * GIB}],
            "traps": {"user": "ada", "is_lingering": False}, "reboot_pending": None, "cleaner": None,
        },
        "caps": {"cgroup": {"grade": "absent", "means": "no cgroup is mounted"}, "sampler": {"grade": "sampled", "means": "each second"}},
        "python": {"program": "/opt/python", "fault": None, "version": "3.12.3", "torch": "2.13.0+cu130", "packages": {"a": {}, "b": {}},
                   "are_files_read": True},
        "skew_seconds": -0.21, "skew_uncertainty_seconds": 0.05, "displace": [], "programs": [],
    }},
    "findings": [
        {"host": "box", "refuses": False, "title": "a reboot is pending", "what": "asked for", "fix": "reboot it"},
        {"host": "", "refuses": True, "title": "the train data can't be used", "what": "model.safetensors: it is cut short", "fix": "repair it"},
        {"host": "away", "refuses": True, "title": "no way there", "what": "No route to host", "fix": "ssh away"},
        {"host": "box", "refuses": True, "title": "the clocks disagree", "what": "2 min", "fix": "timedatectl"},
    ],
    "silent": {"away": {"error": "HostUnreachable", "title": "no way there"}},
}


def test_the_check_shows_everything_that_a_host_showed_of_itself_and_what_is_said_of_it(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path)
    text = layout.painted(render_check(loaded, NOW, width=150, looked=SEEN), colour=False)
    for words in (
        "spark-a, aarch64, Linux 6.14 · boot b00tb00t", "clock -0.2 s (± 0.1 s) · synchronised · UTC-01:00",
        "memory 40 GiB available of 128 GiB · disk 900 GiB free", "NVIDIA GB10, driver 580.1 · used by vllm (pid 7, bob, 60 GiB)",
        "user ada, does not linger · no reboot pending", "cgroup: A absent  no cgroup is mounted", "sampler: S sampled",
        "/opt/python is Python 3.12.3 · torch 2.13.0+cu130 · 2 packages, every file read",
        "~ worth knowing: a reboot is pending: asked for  (reboot it)",
        "! refused: the clocks disagree: 2 min  (timedatectl)", "! refused: the train data can't be used: model.safetensors: it is cut short",
    ):
        assert words in text, words
    assert check_document(loaded, NOW, SEEN)["looked"]["looks"]["box"]["python"]["packages"] == 2
    assert check_document(loaded, NOW)["looked"] is None


def test_a_refusal_is_told_as_its_own_kind_of_error_and_before_a_host_that_is_away() -> None:
    faults = faults_of(SEEN)
    assert faults[0].where == "the plan's data"
    assert [(type(each).__name__, each.title, each.exit_code) for each in faults[1:]] == [
        ("RequestRefused", "the clocks disagree", 3), ("HostUnreachable", "no way there", 8),
    ]


def test_without_a_coordinator_a_child_looks_and_nothing_is_made_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETD_STATE", str(tmp_path / "state"))
    looked = look_at_hosts(plan_of(tmp_path, candidate="command: [echo], memory_cap: 64MiB", host="root: a/b/host, floor: 64MiB"))
    assert faults_of(looked) == [] and set(looked["looks"]["box"]["caps"]) == {"cgroup", "sampler", "allocator", "floor"}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_the_check_says_what_an_environment_holds_and_whether_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text("six==1.17.0\nidna==3.20\n", encoding="utf-8")
    extra = "  spark-a: {transport: ssh, root: /srv/fleetd, environment: {wheels: registry}}\nenvironment: {lock: requirements.lock}\n"
    loaded = plan_of(tmp_path, candidate="command: [python, x]", extra=extra)
    (box, spark) = (each["environment"] for each in check_document(loaded, NOW)["hosts"])
    assert (box["packages"], box["wheels"], spark["wheels"]) == (2, "auto", "registry")
    text = " ".join(shown(loaded, width=400).split())
    assert f"environment of requirements.lock: 2 packages, lock {box['lock_sha256'][:12]} · wheels brought from here · (line 6)" in text
    assert "wheels fetched by the host" in text


def test_the_check_says_from_whom_a_host_takes_its_data(tmp_path: Path) -> None:
    sparks = "transport: ssh, root: /srv/a, capacity: 32GiB}\n  other: {transport: ssh, root: /srv/b, capacity: 32GiB, data_from: "
    text = shown(plan_of(tmp_path, host=sparks + "{host: box, address: 10.0.0.1}"))
    assert "data from box over 10.0.0.1 · (line 5)" in text and text.count("data from") == 1


def test_the_check_fits_a_narrow_terminal() -> None:
    loaded = load_plan(MANPAGES, now=NOW)
    longest_word = max(len(word) for word in shown(loaded).split())
    assert max(layout.width_of(text) for text in shown(loaded, width=80).split("\n")) <= max(80, longest_word + 20)


def test_candidates_that_do_not_fit_together_are_counted(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, host="root: host, capacity: 4GiB, floor: 1GiB", candidate="command: [echo], memory_cap: 2GiB", extra="")
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text() + "  two: {command: [echo], memory_cap: 2GiB}\n")
    loaded = load_plan(path, now=NOW)
    assert "= 4 GiB: 1 of 2 run at once, the others wait" in " ".join(shown(loaded).split())


def test_the_document_holds_every_value_with_its_source() -> None:
    loaded = load_plan(MANPAGES, now=NOW)
    document = check_document(loaded, NOW)
    assert document["if_launched_now"]["cutoff_at"] == "2026-11-30T09:27:00.000000Z"
    assert document["values"].keys() == loaded.values.keys()
    key = "candidates.slow.memory_cap.host"
    assert document["values"][key] == {"value": 1536 * 1024**2, "source": str(loaded.sources[key])}
    assert [role["split"] for role in document["data"]] == ["train", "validation", "test"]
