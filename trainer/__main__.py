"""The command `python -m trainer` (also `fleetd-trainer`): train, evaluate, and looks at shards, corpora and models.

Torch takes seconds to import, so first comes all that can refuse or stop without it: signal handlers, environment, settings,
data. A SIGTERM in those seconds is a wish like any other: it never kills us, and finds a checkpoint or makes one.
"""

from __future__ import annotations

# ruff: noqa: E402 (the handlers must stand before anything slow is imported)
from trainer.stopping import Stop

STOP = Stop()
if __name__ == "__main__":
    STOP.listen()

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from policies.errors import ExplainedError, GateFailed, LossNotFinite, PlanInvalid
from policies.facts import TrainerExit
from trainer import gate
from trainer.afresh import begin_afresh
from trainer.checkpoint import CHECKPOINTS
from trainer.config import TASK_EVALUATE, TASK_NAME, TASK_TRAIN, EvaluateTask, ProofSettings, TrainTask, read_task
from trainer.data.shards import Corpus, documents, open_corpus, open_role, splits_in
from trainer.environment import RunEnvironment, fix_arithmetic, keep_big_blocks, read_environment
from trainer.formats.zrodlo_commands import add_corpus_commands, add_model_commands
from trainer.formats.zxell_commands import add_commands as add_zxell_commands
from trainer.models.families import model_config, model_digest
from trainer.records import RunRecords
from trainer.resume import choose_checkpoint
from trainer.shards_commands import add_build, add_workers, run_verify

if TYPE_CHECKING:
    from trainer.loop import Training

INSPECT_TOKENS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is that of the trainer contract."""
    STOP.listen()
    asked = _parser().parse_args(arguments)
    try:
        status = asked.act(asked)
    except ExplainedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _tell(asked, error)
        status = exit_status(error)
    finally:
        STOP.ignore()  # a late signal must not turn a good exit status into a death
    return int(status)


def exit_status(error: ExplainedError) -> TrainerExit:
    if isinstance(error, LossNotFinite):
        return TrainerExit.NOT_FINITE
    return TrainerExit.GATE_FAILED if isinstance(error, GateFailed) else TrainerExit.CONFIG


def _tell(asked: argparse.Namespace, error: ExplainedError) -> None:
    """Leave a refusal in the log as well, where the supervisor finds it: an exit status alone tells nobody what to do."""
    run_dir = getattr(asked, "run_dir", None) or (os.environ.get("FLEETD_RUN_DIR") if hasattr(asked, "run_dir") else None)
    if run_dir and Path(run_dir).is_dir() and exit_status(error) is TrainerExit.CONFIG:
        RunRecords(Path(run_dir)).log(event="failed", step=None, because=f"{error.title}: {error.what} ({error.where}); {error.fix}", value=None)


def run_train(asked: argparse.Namespace) -> TrainerExit:
    environment = read_environment(os.environ, asked.run_dir)
    task = read_task(environment.run_dir)
    if not isinstance(task, TrainTask):
        raise _other_task(environment, TASK_TRAIN, "evaluate")
    return train(environment, task, STOP)


def train(environment: RunEnvironment, task: TrainTask, stop: Stop) -> TrainerExit:
    """Train as the task says, from the newest checkpoint on. Torch is imported here, once everything else is known to be good."""
    where, records = str(environment.run_dir / TASK_NAME), RunRecords(environment.run_dir)
    records.sweep()
    if environment.cutoff_at is not None:
        stop.set_cutoff(environment.cutoff_at, environment.cutoff_boottime_seconds)
    fix_arithmetic(task.threads)
    keep_big_blocks()
    config = model_config(task.model, window=task.window, where=where)
    if task.model.path is not None:
        model_digest(Path(task.model.path), task.model.digest)
    corpus = open_role(task.train, vocabulary=config["vocab_size"])
    validation = open_role(task.validation_data, vocabulary=config["vocab_size"]) if task.validation_data else None
    checkpoint = choose_checkpoint(environment.run_dir / CHECKPOINTS, environment.resume, records)
    if task.proof is not None and checkpoint is not None and gate.is_due(environment.run_dir, records, checkpoint.step):
        return gate.prove_the_end(environment.run_dir, checkpoint.step, task.proof, stop, records)
    if stop.because() is not None and checkpoint is not None:
        return _stopped_at(checkpoint.step, stop, records)

    from trainer.prepare import prepare_training

    training = prepare_training(environment, task, config, corpus, validation, checkpoint, stop, records)
    status = training.train() if task.pilot_steps is None else _train_with_pilot(training, task.pilot_steps, environment)
    if status is TrainerExit.FINISHED and task.proof is not None:
        _go_on_to_the_proof(training, task.proof)
    return status


def _go_on_to_the_proof(training: Training, terms: ProofSettings) -> None:
    """Begin the process that proves this end; returns when that was done already, or can't be."""
    run_dir, step, stop, records = training.run_dir, training.state.step, training.stop, training.records
    if gate.is_judged(run_dir, step):
        return
    if gate.has_time(stop, terms):
        begin_afresh(lambda: stop.because() is not None)
    gate.give_up(run_dir, step, terms, records, "a stop was asked for, or the cutoff is too near for it")


def _train_with_pilot(training: Training, steps: int, environment: RunEnvironment) -> TrainerExit:
    """The part of a run with a pilot that its directory says is next. The first two end in a fresh process, which never comes back here."""
    from trainer import pilot
    from trainer.memory import host_limit_bytes
    from trainer.scoring import ScoringStopped

    part, stop, records = pilot.next_part(environment.run_dir, steps, training.resumed), training.stop, training.records
    try:
        if part is pilot.Part.LONG:
            pilot.compare_first_predictions(training)
            return training.train()
        if part is pilot.Part.CHECK:
            pilot.check(training, host_limit_bytes=host_limit_bytes(), cap_bytes=environment.memory_cap_bytes)
        else:
            training.is_pilot = True
            status = training.train()
            if status is not TrainerExit.FINISHED or training.state.step != steps:
                return status
        begin_afresh(lambda: stop.because() is not None)
    except ScoringStopped:
        pass
    return _stopped_at(steps, stop, records)  # asked between two parts: all there is to save is saved


def _stopped_at(step: int, stop: Stop, records: RunRecords) -> TrainerExit:
    records.log(event="stop", step=step, because=stop.because(), skipped=["start"])
    records.lineage("stop", step=step, because=stop.because(), skipped=["start"])
    return TrainerExit.STOPPED


def run_evaluate(asked: argparse.Namespace) -> TrainerExit:
    from trainer.evaluate import check_models, evaluate

    environment = read_environment(os.environ, asked.run_dir)
    task = read_task(environment.run_dir)
    if not isinstance(task, EvaluateTask):
        raise _other_task(environment, TASK_EVALUATE, "train")
    fix_arithmetic(task.threads)
    keep_big_blocks()
    check_models(task, where=str(environment.run_dir / TASK_NAME))
    records = RunRecords(environment.run_dir)
    records.sweep()
    return evaluate(environment.run_dir, task, open_role(task.train), open_role(task.scored), STOP, records)


def run_prove(asked: argparse.Namespace) -> TrainerExit:
    from trainer.prove import prove, report

    proof = prove(Path(asked.run_dir).absolute(), start=asked.start, steps=asked.steps, stop=STOP)
    return report(proof, as_json=asked.json, is_recorded=asked.record)


def run_inspect(asked: argparse.Namespace) -> TrainerExit:
    """One JSON document about a directory of shards, the first tokens of each split included."""
    described = {}
    for corpus in _all_splits(asked):
        families: dict[str, int] = {}
        for document in documents(corpus):
            families[document.family] = families.get(document.family, 0) + len(document.tokens)
        described[corpus.split] = {
            "shards": len(corpus.shards), "tokens": corpus.token_count, "documents": corpus.document_count, "vocabulary": corpus.vocabulary,
            "tokens_by_family": families, "first_tokens": corpus.shards[0].tokens[:INSPECT_TOKENS].tolist(), "directory_digest": corpus.digest,
        }
    print(json.dumps(described, indent=1, sort_keys=True))
    return TrainerExit.FINISHED


def _all_splits(asked: argparse.Namespace) -> list[Corpus]:
    folder = Path(asked.directory)
    splits = [asked.split] if asked.split else list(splits_in(folder))
    return [open_corpus(folder, split) for split in splits]


def _other_task(environment: RunEnvironment, needed: str, command: str) -> PlanInvalid:
    return PlanInvalid("the task is for another command", where=str(environment.run_dir / TASK_NAME), what=f"its task is not {needed}",
                       fix=f"fleetd-trainer {command} {environment.run_dir}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fleetd-trainer", description="Train and score language models, exactly resumable.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    runs = (("train", run_train, "train as task.json says, resuming by itself"), ("evaluate", run_evaluate, "score a reserved split"))
    for name, act, words in runs:
        command = commands.add_parser(name, help=words)
        command.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="default: $FLEETD_RUN_DIR")
        command.set_defaults(act=act)
    prove = commands.add_parser("prove", help="take steps of a run again from a checkpoint, and compare every bit with what it left")
    prove.add_argument("run_dir", metavar="RUN_DIR")
    prove.add_argument("--from", dest="start", metavar="STEP", help="a checkpoint of the run (default: the newest that another one follows)")
    prove.add_argument("--steps", type=int, metavar="N", help="how many steps (default: up to the newest checkpoint)")
    prove.add_argument("--json", action="store_true", help="print one JSON document")
    prove.add_argument("--record", action="store_true", help="also write evidence/exactness.json in the run")
    prove.set_defaults(act=run_prove)
    shards = commands.add_parser("shards", help="look at token shards").add_subparsers(required=True, metavar="ACT")
    for name, act, words in (("verify", run_verify, "check every promise of the index"), ("inspect", run_inspect, "describe a directory as JSON")):
        command = shards.add_parser(name, help=words)
        command.add_argument("directory", metavar="DIR")
        command.add_argument("--split", help="only this split of the index")
        command.set_defaults(act=act)
        if name == "verify":
            add_workers(command)
    add_build(shards)
    add_corpus_commands(commands)
    add_model_commands(commands)
    add_zxell_commands(commands)
    return parser


def _leave_at_once(status: int) -> None:
    """Everything is written, synced and closed: what is left is to take torch apart, which lasts longer than a small save. A supervisor waits for it,
    and on a busy machine the cutoff may come first."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass  # whoever read it has gone
    os._exit(status)


if __name__ == "__main__":
    _leave_at_once(main())
