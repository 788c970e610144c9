"""The run directory: orders only move forward, records are whole or absent, a checkpoint is what its digests say."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from host_edges import make_run, make_spec, python, want_run

from fleetd.files import file_entry, files_below
from fleetd.host import rundir
from fleetd.model import CutoffOrder, ExitRecord
from fleetd.paths import HostPaths
from fleetd.wire import WireError
from policies.errors import CheckpointDamaged, RequestRefused
from policies.facts import RunKind, Want, step_name
from policies.manifest import manifest_body

NOW = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)


@pytest.fixture
def paths(tmp_path):
    return make_run(tmp_path, make_spec(python("pass"), run_id="r1"))


def test_a_run_is_created_whole_and_only_once(tmp_path):
    spec, paths = make_spec(python("pass"), run_id="r1"), HostPaths(tmp_path).run("r1")

    assert rundir.create_run(paths, spec, {"task": "x"}, want_run())
    assert not rundir.create_run(paths, spec, {"task": "x"}, want_run()), "a second time changes nothing"
    assert not rundir.create_run(paths, replace(spec, owner=replace(spec.owner, generation=9)), None, want_run())
    assert rundir.read_spec(paths) == spec
    assert json.loads(paths.task.read_text()) == {"task": "x"}
    assert os.listdir(tmp_path / "runs") == ["r1"], "nothing temporary is left"


def test_another_order_for_a_run_that_exists_is_refused_in_three_lines(paths):
    with pytest.raises(RequestRefused, match="exists with another order") as refused:
        rundir.create_run(paths, make_spec(("other",), run_id="r1"), None, want_run())

    assert refused.value.where == str(paths.order)


def test_only_a_higher_sequence_changes_the_wish(paths):
    stop = want_run(3, Want.STOP)

    assert rundir.apply_want(paths, stop) == (True, stop)
    assert rundir.apply_want(paths, want_run(2)) == (False, stop)
    assert rundir.apply_want(paths, want_run(3)) == (False, stop)
    assert rundir.read_want(paths) == stop


def test_a_cutoff_only_moves_earlier(paths):
    recorded_at = rundir.read_spec(paths).deadline.cutoff_at
    earlier = CutoffOrder(sequence=1, cutoff_at=recorded_at - timedelta(seconds=60), because="slow validation")
    later = CutoffOrder(sequence=2, cutoff_at=recorded_at - timedelta(seconds=30), because="hope")

    assert rundir.apply_cutoff(paths, replace(earlier, cutoff_at=recorded_at + timedelta(seconds=1)))[0] is False
    assert rundir.apply_cutoff(paths, earlier) == (True, earlier)
    assert rundir.apply_cutoff(paths, later) == (False, earlier)
    assert rundir.effective_cutoff(rundir.read_spec(paths), rundir.read_cutoff(paths)) == earlier.cutoff_at


def test_an_evaluation_ends_at_the_final_deadline_and_a_serving_run_at_none():
    train = make_spec(python("pass"), run_id="r1")
    evaluate, serve = replace(train, kind=RunKind.EVALUATE), replace(train, kind=RunKind.SERVE, deadline=None)

    assert rundir.effective_cutoff(train, None) == train.deadline.cutoff_at
    assert rundir.effective_cutoff(evaluate, None) == train.deadline.final_at
    assert rundir.effective_cutoff(serve, None) is None


def test_attempts_are_counted_and_claimed_once(paths):
    assert rundir.newest_attempt(paths) == 1
    assert rundir.create_attempt(paths) == 2
    rundir.mark_started(paths, 2)

    assert rundir.is_started(paths, 2)
    assert not rundir.is_started(paths, 1)
    with pytest.raises(FileExistsError):
        rundir.mark_started(paths, 2)


def test_what_could_not_be_synced_was_not_made_and_can_be_made_again(paths, monkeypatch):
    """A claim that stood although its sync found no room was taken for another shim's at the next try, and the attempt was lost."""
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "sync_folder", refuse)
        with pytest.raises(OSError, match="No space"):
            rundir.create_attempt(paths)
        with pytest.raises(OSError, match="No space"):
            rundir.mark_started(paths, 1)

    assert not rundir.is_started(paths, 1)
    rundir.mark_started(paths, 1)
    assert rundir.create_attempt(paths) == 2


def refuse(_folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_first_recorded_exit_rules(paths):
    first = ExitRecord(attempt=1, at=NOW, wait_status=2560, exit_code=10, signal=None, observed_by="shim", evidence={"oom_kills": 0})

    assert rundir.read_exit(paths, 1) is None
    assert rundir.write_exit(paths, first)
    assert not rundir.write_exit(paths, replace(first, observed_by="nobody", wait_status=None))
    assert rundir.read_exit(paths, 1) == first


def test_a_damaged_record_names_its_path(paths):
    paths.want.write_text('{"sequence": 1, "wan')

    with pytest.raises(WireError, match=r"want\.json"):
        rundir.read_want(paths)


def test_a_damaged_heartbeat_is_no_heartbeat(paths):
    rundir.write_heartbeat(paths, rundir.Heartbeat(boottime_seconds=5.0, pid=7))
    assert rundir.read_heartbeat(paths) == rundir.Heartbeat(boottime_seconds=5.0, pid=7)

    paths.heartbeat.write_bytes(b"\0\0")
    assert rundir.read_heartbeat(paths) is None


def test_a_process_records_itself(paths):
    record = rundir.write_program(paths.supervisor, NOW)

    assert rundir.read_program(paths.supervisor) == record
    assert record.identity.pid == os.getpid()
    assert rundir.read_program(paths.shim) is None


def test_a_lock_has_one_holder_and_is_free_after_its_death(paths):
    code = f"from fleetd.host.rundir import try_lock\nfrom pathlib import Path\nprint(try_lock(Path({str(paths.lock)!r})), flush=True)\ninput()"
    assert not rundir.is_locked(paths.lock)
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline().strip() != b"None"

        assert rundir.is_locked(paths.lock)
        assert rundir.try_lock(paths.lock, patience_seconds=0.0) is None
    finally:
        holder.kill()
        holder.communicate()
    assert not rundir.is_locked(paths.lock)


def test_looking_at_a_lock_does_not_take_it(paths):
    paths.lock.touch()

    assert not rundir.is_locked(paths.lock)
    taken = rundir.try_lock(paths.lock, patience_seconds=0.0)

    assert taken is not None
    os.close(taken)


def test_a_tail_hands_out_each_line_once_and_waits_for_a_torn_one(paths):
    tail = rundir.LogTail(paths.log)
    assert tail.read() == ()

    paths.log.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    assert tail.read() == ({"step": 1}, {"step": 2})
    assert tail.read() == ()

    with paths.log.open("ab") as file:
        file.write(b'ep":3}\n')
    assert tail.read() == ({"step": 3},)
    assert tail.offset == paths.log.stat().st_size


def test_a_tail_goes_on_from_where_another_left_it(paths):
    paths.log.write_bytes(b'{"step":1}\n{"step":2}\n')
    first = rundir.LogTail(paths.log)
    first.read(bytes_max=15)

    assert rundir.LogTail(paths.log, first.offset).read() == ({"step": 2},)


def test_a_tail_reads_a_bounded_amount_and_counts_what_is_no_record(paths):
    paths.log.write_bytes(b'{"step":1}\nnoise\n[1]\n' + b"y" * 5000 + b'\n{"step":2}\n')
    tail = rundir.LogTail(paths.log)

    found = [record for _ in range(100) for record in tail.read(bytes_max=1000)]

    assert found == [{"step": 1}, {"step": 2}]
    assert tail.skipped == 3


def test_a_file_that_was_replaced_or_cut_short_is_read_from_its_beginning(paths):
    paths.log.write_bytes(b'{"step":1}\n{"step":2}\n')
    tail = rundir.LogTail(paths.log)
    tail.read()

    paths.log.write_bytes(b'{"step":9}\n')
    assert tail.read() == ({"step": 9},)

    fresh = paths.log.with_suffix(".new")
    fresh.write_bytes(b'{"step":10}\n{"step":11}\n{"step":12}\n')
    fresh.rename(paths.log)
    assert tail.read() == ({"step": 10}, {"step": 11}, {"step": 12})


def checkpoint(paths, step: int, content: bytes = b"weights"):
    folder = paths.checkpoints / step_name(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "trainer.json").write_text("{}")
    entries = [file_entry(folder, path) for path in files_below(folder)]
    (folder / "manifest.json").write_text(json.dumps(manifest_body(entries)))
    return folder


def test_a_run_resumes_from_the_newest_checkpoint_that_verifies(paths):
    checkpoint(paths, 100)
    newest = checkpoint(paths, 200)
    (paths.checkpoints / ".tmp-step-000000300").mkdir()

    claim, refused = rundir.choose_resume(paths)

    assert (claim.step, claim.path, refused) == (200, newest, ())
    assert claim.digest == json.loads((newest / "manifest.json").read_text())["digest"]
    assert [each.step for each in rundir.newest_checkpoints(paths)] == [200, 100]


def cut_short(folder):
    os.truncate(folder / "model.safetensors", 3)


def flip_a_byte(folder):
    (folder / "model.safetensors").write_bytes(b"Weights")


def lose_a_file(folder):
    (folder / "trainer.json").unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def change_the_manifest(folder):
    body = json.loads((folder / "manifest.json").read_text())
    body["files"]["model.safetensors"]["bytes"] += 1
    (folder / "manifest.json").write_text(json.dumps(body))


def link_a_file(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("damage", [cut_short, flip_a_byte, lose_a_file, lose_the_manifest, change_the_manifest, link_a_file])
def test_a_damaged_checkpoint_is_refused_with_the_reason_and_the_one_before_is_taken(paths, damage):
    checkpoint(paths, 100)
    newest = checkpoint(paths, 200)
    damage(newest)

    claim, refused = rundir.choose_resume(paths)

    assert claim.step == 100
    assert len(refused) == 1
    assert refused[0].startswith("step-000000200: ")
    with pytest.raises(CheckpointDamaged) as damaged:
        rundir.verify_checkpoint(newest)
    assert damaged.value.where.startswith(str(newest))


def test_without_any_good_checkpoint_a_run_starts_from_its_beginning(paths):
    assert rundir.choose_resume(paths) == (None, ())
    lose_a_file(checkpoint(paths, 100))

    claim, refused = rundir.choose_resume(paths)

    assert claim is None
    assert len(refused) == 1
