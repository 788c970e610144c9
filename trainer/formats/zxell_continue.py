"""A zxell run goes on as a run of ours, and a run of ours leaves as one of zxell.

    import   config.json, log.jsonl, ckpt_*.pt   ->   task.json (sampler: zxell), checkpoints/step-N, zxell/ (their files as they were)
    export   the newest checkpoint that verifies ->   config.json, log.jsonl, ckpt_last.pt, and ckpt_final.pt when all steps are done

What zxell never wrote down stays unknown: a loss that it did not log is null. What a checkpoint of ours holds and zxell has no
place for (the other random streams) is not needed by its arithmetic: there is no dropout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from policies.errors import PlanInvalid, RequestRefused
from trainer.checkpoint import CHECKPOINTS, Checkpoint, newest_verified, write_checkpoint
from trainer.config import SAMPLER_ZXELL, TASK_NAME, TrainTask, parse_task, read_task
from trainer.data.shards import INDEX_NAME, Corpus, open_corpus, open_role
from trainer.data.zxell_sampler import generator_from_json
from trainer.environment import RunEnvironment, fix_arithmetic
from trainer.files import dumps, dumps_line, read_json, write_synced
from trainer.formats.new_directory import new_directory
from trainer.formats.zxell_checkpoint import OptimizerState, ZxellCheckpoint, read_checkpoint, write_checkpoint_file
from trainer.formats.zxell_run import (
    CONFIG_NAME,
    FINAL_NAME,
    LAST_NAME,
    LOG_EVERY,
    LOG_NAME,
    ZxellRun,
    losses_by_step,
    read_log,
    read_run,
    training_records,
)
from trainer.formats.zxell_weights import from_llama, llama_config, model_of_llama, to_llama
from trainer.models.build import WEIGHTS_NAME, fill_weights, load_tensors, trained_weights
from trainer.models.families import model_config, read_config
from trainer.prepare import prepare_training
from trainer.records import RunRecords
from trainer.schedule import learning_rate
from trainer.state import MOMENTS, OPTIMIZER_NAME, STATE_NAME, read_state
from trainer.stopping import Stop

KEPT, IMPORTED_NAME = "zxell", "imported.json"
"""The folder of a run directory that keeps the files of the zxell run it goes on from, and the step where it took over."""
VALIDATION_SPLIT, TRAIN_SPLIT = "val", "train"


def import_run(source: Path, target: Path, shards: Path, *, threads: int = 1, device: str = "auto", validate: bool = True) -> Checkpoint:
    """Make the run directory `target` (new) that goes on exactly where the zxell run stands. Returns its first checkpoint."""
    run = read_run(source)
    checkpoint = read_checkpoint(run.checkpoint())
    _check_same(run, checkpoint)
    assert checkpoint.optimizer is not None
    task_body = continuation_task(run, checkpoint.optimizer, shards, threads=threads, device=device, validate=validate)
    task = parse_task(task_body, where=str(source / CONFIG_NAME))
    assert isinstance(task, TrainTask)
    fix_arithmetic(threads)
    corpora = [open_corpus(shards, split, vocabulary=run.model.vocab_size) for split in (TRAIN_SPLIT, *([VALIDATION_SPLIT] if validate else []))]
    _check_shards(run, corpora[0])
    with new_directory(target) as folder:
        write_synced(folder / TASK_NAME, dumps(task_body))
        (folder / KEPT).mkdir()
        for name in (CONFIG_NAME, LOG_NAME):
            if (source / name).is_file():
                write_synced(folder / KEPT / name, (source / name).read_bytes())
        write_synced(folder / KEPT / IMPORTED_NAME, dumps({"schema": 1, "step": checkpoint.step}))
        (folder / CHECKPOINTS).mkdir()
        first = _first_checkpoint(folder, task, corpora, run, checkpoint)
    return Checkpoint(path=target / CHECKPOINTS / first.path.name, step=first.step, digest=first.digest, bytes=first.bytes)


def continuation_task(run: ZxellRun, optimizer: OptimizerState, shards: Path, *, threads: int, device: str, validate: bool) -> dict[str, Any]:
    """The task.json of the continuation: zxell's settings in our words. bf16 on CUDA only, as there."""
    args, on_cuda = run.args, device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    data: dict[str, Any] = {"train": {"path": str(shards.absolute()), "split": TRAIN_SPLIT}}
    if validate:
        data["validation"] = {"path": str(shards.absolute()), "split": VALIDATION_SPLIT, "tokens_per_document_max": run.window}
    return {
        "schema": 1, "task": "language_model", "model": {"config": llama_config(run.model)}, "data": data, "sampler": SAMPLER_ZXELL,
        "window": run.window, "batch": args["batch"] * args["grad_accum"], "micro_batch": args["batch"], "steps": args["steps"], "seed": args["seed"],
        "optimizer": {
            "lr": args["lr"], "min_lr_ratio": args["min_lr_ratio"], "warmup": args["warmup"], "weight_decay": args["wd"],
            "betas": list(optimizer.betas), "eps": optimizer.eps, "clip": args["clip"] or None,
        },
        "checkpoint": {"every_steps": args.get("ckpt_every") or None, "keep": 2}, "validation": {"every_steps": args.get("eval_every") or None},
        "threads": threads, "device": device, "precision": "bf16" if on_cuda else "fp32", "log_every": 1,
    }


def export_run(run_dir: Path, target: Path) -> int:
    """Write `target` (new) as a zxell run directory of the newest checkpoint that verifies. Returns its step."""
    task = read_task(run_dir)
    if not isinstance(task, TrainTask) or task.sampler != SAMPLER_ZXELL:
        raise PlanInvalid("the run can't leave as one of zxell", where=str(run_dir / TASK_NAME),
                          what=f"only a language model trained with sampler {SAMPLER_ZXELL!r} has a state that zxell can go on from",
                          fix="export its weights alone: fleetd-trainer zxell weights CHECKPOINT FILE.pt")
    newest = newest_verified(run_dir / CHECKPOINTS).newest
    if newest is None:
        raise RequestRefused("there is nothing to export", where=str(run_dir / CHECKPOINTS), what="no checkpoint verifies",
                             fix=f"train first: fleetd-trainer train {run_dir}")
    original = read_run(run_dir / KEPT) if (run_dir / KEPT).is_dir() else None
    args = original.args if original is not None else _args_of(task)
    checkpoint = zxell_of(newest.path, task, args)
    config = original.config_bytes if original is not None else dumps({
        "model": checkpoint.model.to_json(), "args": args, "train_shards": [shard.name for shard in _train_corpus(task).shards]})
    log = _log_lines(run_dir, original, every=args.get("log_every") or LOG_EVERY, upto=newest.step)

    with new_directory(target) as folder:
        write_synced(folder / CONFIG_NAME, config)
        write_synced(folder / LOG_NAME, log)
        write_checkpoint_file(folder / LAST_NAME, checkpoint)
        if newest.step == task.steps:
            write_checkpoint_file(folder / FINAL_NAME, checkpoint)
    return newest.step


def zxell_of(path: Path, task: TrainTask, args: dict[str, Any]) -> ZxellCheckpoint:
    """A verified checkpoint of ours as zxell's, the sampler's generator included."""
    described, model = read_state(path), model_of_llama(read_config(path), where=str(path / CONFIG_NAME))
    stored = load_tensors(path / OPTIMIZER_NAME)
    moments = {key: from_llama(model, _below(stored, key), where=str(path / OPTIMIZER_NAME)) for key in MOMENTS}
    step, settings = described["step"], task.optimizer
    return ZxellCheckpoint(
        model=model, tensors=from_llama(model, load_tensors(path / WEIGHTS_NAME), where=str(path / WEIGHTS_NAME)), step=step, args=args,
        optimizer=OptimizerState(
            moments=moments, step=step, lr=learning_rate(max(step - 1, 0), settings, task.steps), betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay,
        ),
        generator=generator_from_json(described.get("sampler", {}).get("generator"), where=str(path / STATE_NAME)),
    )


def _first_checkpoint(folder: Path, task: TrainTask, corpora: list[Corpus], run: ZxellRun, checkpoint: ZxellCheckpoint) -> Checkpoint:
    """The zxell state as a checkpoint of ours, made by the same code that saves any other."""
    assert checkpoint.optimizer is not None and checkpoint.generator is not None
    environment = RunEnvironment(run_dir=folder.absolute(), run_id=folder.name, resume=None, memory_cap_bytes=None, cutoff_at=None)
    records = RunRecords(folder)
    config = model_config(task.model, window=task.window, where=str(run.folder / CONFIG_NAME))
    training = prepare_training(environment, task, config, corpora[0], corpora[1] if len(corpora) > 1 else None, None, Stop(), records)
    state = training.state
    fill_weights(state.model, to_llama(run.model, checkpoint.tensors), where=str(run.folder))
    moments = {key: to_llama(run.model, checkpoint.optimizer.moments[key]) for key in MOMENTS}
    for name, weight in trained_weights(state.model).items():
        entry = state.optimizer.state[weight]
        entry["step"].fill_(checkpoint.optimizer.step)
        for key in MOMENTS:
            entry[key].copy_(moments[key][name])
    state.step, state.cursor = checkpoint.step, checkpoint.step * task.batch
    losses: Any = losses_by_step(read_log(run.folder), checkpoint.step)
    state.losses = losses  # one that was never logged is null
    assert state.sampler is not None
    state.sampler.set_generator(checkpoint.generator, state.cursor)
    return write_checkpoint(folder / CHECKPOINTS, state.step, state.contents())


def _check_same(run: ZxellRun, checkpoint: ZxellCheckpoint) -> None:
    where = str(run.checkpoint())
    if checkpoint.optimizer is None or checkpoint.generator is None:
        raise PlanInvalid("the zxell run can't go on", where=where, what="it holds weights only, no optimizer and no sampler",
                          fix="start a new run from its weights: fleetd-trainer zxell to-model FILE.pt DIR")
    if checkpoint.model != run.model:
        raise PlanInvalid("the zxell run can't go on", where=where, what=f"its config is {checkpoint.model.to_json()}, "
                          f"config.json says {run.model.to_json()}",
                          fix="put checkpoint and config.json of the same run together")
    changed = [key for key in ("batch", "grad_accum", "seed", "lr", "warmup", "wd", "clip", "min_lr_ratio", "steps")
               if key in checkpoint.args and checkpoint.args[key] != run.args.get(key)]
    if changed:
        told = "; ".join(f"args.{key}: {checkpoint.args[key]!r} in the checkpoint, {run.args.get(key)!r} in config.json" for key in changed)
        raise PlanInvalid("the zxell run can't go on", where=where, what=told, fix="put checkpoint and config.json of the same run together")
    if checkpoint.optimizer.weight_decay != run.args["wd"]:
        raise PlanInvalid("the zxell run can't go on", where=where, what=f"its optimizer decays by {checkpoint.optimizer.weight_decay}, "
                          f"args.wd is {run.args['wd']}", fix="put checkpoint and config.json of the same run together")
    if checkpoint.step > run.args["steps"]:
        raise PlanInvalid("the zxell run can't go on", where=where, what=f"it has {checkpoint.step} steps, args.steps is {run.args['steps']}",
                          fix="put checkpoint and config.json of the same run together")


def _check_shards(run: ZxellRun, corpus: Corpus) -> None:
    """The sampler draws by number and size of the shards: others, or another order, and the continuation is another training."""
    here = [shard.name for shard in corpus.shards]
    if run.train_shards and list(run.train_shards) != here:
        raise PlanInvalid("the zxell run can't go on on these shards", where=str(corpus.folder / INDEX_NAME),
                          what=f"the run was trained on {len(run.train_shards)} shards ({', '.join(run.train_shards[:3])}, ...), "
                          f"here are {len(here)} ({', '.join(here[:3])}, ...)", fix="name a directory whose index holds the run's train shards only")


def _train_corpus(task: TrainTask) -> Corpus:
    return open_role(task.train)


def _args_of(task: TrainTask) -> dict[str, Any]:
    """The args of a zxell run with the settings of a task of ours."""
    optimizer = task.optimizer
    return {
        "preset": None, "shards": None, "out": None, "steps": task.steps, "batch": task.micro_batch, "grad_accum": task.batch // task.micro_batch,
        "ctx": task.window, "lr": optimizer.lr, "min_lr_ratio": optimizer.min_lr_ratio, "warmup": optimizer.warmup, "wd": optimizer.weight_decay,
        "clip": optimizer.clip or 0.0, "eval_every": task.validation.every_steps or 0, "eval_tokens": 0, "final_eval_tokens": 0,
        "ckpt_every": task.checkpoint.every_steps or 0, "log_every": LOG_EVERY, "device": task.device, "seed": task.seed, "resume": False,
        "max_train_shards": None,
    }


def _log_lines(run_dir: Path, original: ZxellRun | None, *, every: int, upto: int) -> bytes:
    """The log of the zxell run as it was, and our own steps after it in the same words."""
    kept = (run_dir / KEPT / LOG_NAME).read_bytes() if original is not None and (run_dir / KEPT / LOG_NAME).is_file() else b""
    if kept and not kept.endswith(b"\n"):
        kept += b"\n"
    theirs = [record for record in (read_log(run_dir / KEPT) if kept else []) if "loss" in record]
    ours = [record for record in read_log(run_dir) if record["step"] <= upto]
    first = _imported_step(run_dir) if original is not None else 0
    elapsed = max((float(record.get("elapsed_s") or 0.0) for record in theirs), default=0.0)
    return kept + b"".join(dumps_line(record) for record in training_records(ours, after=first, every=every, elapsed_seconds=elapsed))


def _imported_step(run_dir: Path) -> int:
    return int(read_json(run_dir / KEPT / IMPORTED_NAME)["step"])


def _below(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{key}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}

