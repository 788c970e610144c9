"""The words of the command line that are about zxell: `fleetd-trainer zxell ACT`, and `fleetd-trainer sample`.

Each act imports what is heavy when it runs, so that the command line stays quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from policies.errors import PlanInvalid
from policies.facts import TrainerExit

TOKENIZER_NAME = "tokenizer.model"
PROGRESS_EVERY = 50


def add_commands(commands: Any) -> None:
    """Hang `zxell` and `sample` into the parser of the program."""
    acts = commands.add_parser("zxell", help="zxell's runs and weights, in and out").add_subparsers(required=True, metavar="ACT")
    for name, act, words, arguments in (
        ("inspect", run_inspect, "check a run directory or a .pt and describe it as JSON", ("source",)),
        ("import", run_import, "make a run directory that goes on exactly where a zxell run stands", ("source", "target")),
        ("export", run_export, "write the newest checkpoint of a run as a zxell run directory", ("source", "target")),
        ("init", run_init, "a fresh model directory with the weights that zxell begins with", ("target",)),
        ("to-model", run_to_model, "a .pt as a Llama model directory", ("source", "target")),
        ("weights", run_weights, "a Llama model directory or checkpoint as a weights-only .pt", ("source", "target")),
        ("evaluate", run_evaluate, "perplexity over one shard, by language, as zxell counts it", ("source",)),
    ):
        command = acts.add_parser(name, help=words)
        for argument in arguments:
            command.add_argument(argument, type=Path, metavar=argument.upper())
        command.set_defaults(act=act)
        if name in ("import", "evaluate"):
            command.add_argument("--shards", type=Path, required=True, metavar="DIR", help="the directory of token shards")
            command.add_argument("--threads", type=int, default=1)
        if name == "import":
            command.add_argument("--device", default="auto")
            command.add_argument("--no-validation", action="store_true", help="leave the val split alone")
        if name == "init":
            command.add_argument("--preset", default="S", help="tiny, S, M or L")
            command.add_argument("--vocabulary", type=int, default=48_000)
            command.add_argument("--seed", type=int, default=0)
        if name == "weights":
            command.add_argument("--bf16", action="store_true", help="bf16 without the tied head, as clients exchange it")
        if name == "evaluate":
            command.add_argument("--split", default="val")
            command.add_argument("--tokens", type=int, help="only so many tokens from the head of the shard")
            command.add_argument("--ctx", type=int, help="window; default: that of the model")
            command.add_argument("--batch", type=int, default=8)
    _add_sample(commands)


def _add_sample(commands: Any) -> None:
    command = commands.add_parser("sample", help="write text from a model directory, a checkpoint or a .pt")
    command.add_argument("source", type=Path, metavar="MODEL")
    command.add_argument("--prompt", default="", help="text to go on from; default: the beginning of an article")
    command.add_argument("--tokenizer", type=Path, help=f"a SentencePiece model; default: {TOKENIZER_NAME} beside the model")
    command.add_argument("--tokens", type=int, default=200)
    command.add_argument("--temperature", type=float, default=0.8)
    command.add_argument("--top", type=int, help="draw from the likeliest so many tokens only")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--threads", type=int, default=1)
    command.set_defaults(act=run_sample)


def run_inspect(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_checkpoint import read_checkpoint
    from trainer.formats.zxell_run import read_log, read_run
    from trainer.formats.zxell_weights import parameter_count

    described: dict[str, Any] = {}
    path = asked.source
    if path.is_dir():
        run = read_run(path)
        records = read_log(path)
        described["run"] = {"args": run.args, "train_shards": len(run.train_shards), "log_records": len(records),
                            "last_logged_step": max((record["step"] for record in records), default=None)}
        path = run.checkpoint()
    checkpoint = read_checkpoint(path)
    described["checkpoint"] = {"file": path.name, "step": checkpoint.step, "model": checkpoint.model.to_json(),
                               "parameters": parameter_count(checkpoint.model), "holds": "everything" if checkpoint.optimizer else "weights only"}
    print(json.dumps(described, indent=1, sort_keys=True))
    return TrainerExit.FINISHED


def run_import(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_continue import import_run

    first = import_run(asked.source, asked.target, asked.shards, threads=asked.threads, device=asked.device, validate=not asked.no_validation)
    print(f"step {first.step} of the zxell run is {first.path}\n  go on: fleetd-trainer train {asked.target}")
    return TrainerExit.FINISHED


def run_export(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_continue import export_run

    print(f"step {export_run(asked.source, asked.target)} is in {asked.target}")
    return TrainerExit.FINISHED


def run_init(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_models import write_fresh_model
    from trainer.formats.zxell_weights import PRESETS, parameter_count, parse_model

    if asked.preset not in PRESETS:
        raise PlanInvalid("there is no such preset", where="--preset", what=f"{asked.preset!r} is not in {', '.join(PRESETS)}", fix="choose one")
    model = parse_model({**PRESETS[asked.preset], "vocab_size": asked.vocabulary}, where="--vocabulary")
    write_fresh_model(asked.target, model, seed=asked.seed)
    print(f"{asked.target} is a fresh model of {parameter_count(model) / 1e6:.1f} M parameters")
    return TrainerExit.FINISHED


def run_to_model(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_models import write_model_directory

    write_model_directory(asked.source, asked.target)
    print(f"{asked.target} is a model directory")
    return TrainerExit.FINISHED


def run_weights(asked: argparse.Namespace) -> TrainerExit:
    from trainer.formats.zxell_models import write_weights_of

    write_weights_of(asked.source, asked.target, half=asked.bf16)
    print(f"{asked.target} holds the weights{' in bf16, without the tied head' if asked.bf16 else ''}")
    return TrainerExit.FINISHED


def run_evaluate(asked: argparse.Namespace) -> TrainerExit:
    """Print the line that zxell would log."""
    _ready(asked)
    from trainer.data.shards import open_corpus
    from trainer.formats.zxell_evaluation import evaluate_shard
    from trainer.formats.zxell_models import load_any

    model, window, step = load_any(asked.source)
    corpus = open_corpus(asked.shards, asked.split, vocabulary=int(model.config.vocab_size))  # type: ignore[arg-type, union-attr]
    found = evaluate_shard(model, corpus, window=asked.ctx or window, tokens_max=asked.tokens, batch=asked.batch, on_batch=_tell)
    print(json.dumps(found.record(step, "val" if asked.tokens else f"{asked.split}_full")))
    return TrainerExit.FINISHED


def run_sample(asked: argparse.Namespace) -> TrainerExit:
    _ready(asked)
    from trainer.formats.zxell_models import load_any
    from trainer.sample import SampleSettings, load_pieces, sample_tokens

    if asked.tokens < 1 or asked.temperature < 0 or (asked.top is not None and asked.top < 1):
        raise PlanInvalid("nothing can be drawn like that", where="sample", what="tokens and top start at 1, temperature at 0", fix="correct them")
    beside = asked.source if asked.source.is_dir() else asked.source.parent
    pieces = load_pieces(asked.tokenizer or beside / TOKENIZER_NAME)
    model, window, _ = load_any(asked.source)
    settings = SampleSettings(tokens_max=asked.tokens, temperature=asked.temperature, top=asked.top, seed=asked.seed)
    print(asked.prompt + pieces.decode(sample_tokens(model, pieces.encode(asked.prompt), settings, window=window)))
    return TrainerExit.FINISHED


def _ready(asked: argparse.Namespace) -> None:
    from trainer.environment import fix_arithmetic, keep_big_blocks

    fix_arithmetic(asked.threads)
    keep_big_blocks()
    from trainer.fingerprint import make_strict

    make_strict(asked.threads)


def _tell(done: int, total: int) -> None:
    if done % PROGRESS_EVERY == 0 or done == total:
        print(f"{done} of {total} batches", file=sys.stderr, flush=True)
