"""The commands of `fleetd-trainer` about corpora and model directories: build, inspect, export. Answers are one JSON document."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from policies.facts import TrainerExit
from trainer.formats.transformers_dirs import read_model_directory
from trainer.formats.zrodlo_build import build_corpus
from trainer.formats.zrodlo_corpus import ZrodloCorpus, open_zrodlo_corpus
from trainer.formats.zrodlo_models import LAYOUT_BARE, LAYOUT_WHOLE, export_checkpoint, export_model
from trainer.models.shapes import is_tied

FIRST_TOKENS = 12


def add_corpus_commands(commands: Any) -> None:
    """`corpus build|inspect`."""
    corpus = commands.add_parser("corpus", help="build or look at a Zrodlo corpus").add_subparsers(required=True, metavar="ACT")
    build = corpus.add_parser("build", help="from files and JSON Lines, with a tokenizer.json, into a new directory")
    build.add_argument("sources", nargs="+", metavar="SOURCE", type=Path, help="a text file (one document), a .jsonl file, or a directory of these")
    build.add_argument("--tokenizer", required=True, metavar="FILE", type=Path, help="a tokenizer.json")
    build.add_argument("--out", required=True, metavar="DIR", type=Path, help="a directory that does not exist yet")
    build.add_argument("--eos", metavar="TOKEN", help="the token that ends a document; default: the one of the usual names that there is")
    build.add_argument("--text-key", default="text", metavar="KEY", help="where a JSON line has its text (default: text)")
    build.set_defaults(act=run_corpus_build)
    inspect = corpus.add_parser("inspect", help="verify a corpus and describe it as JSON")
    inspect.add_argument("directory", metavar="DIR", type=Path)
    inspect.set_defaults(act=run_corpus_inspect)


def add_model_commands(commands: Any) -> None:
    """`model inspect|export`."""
    model = commands.add_parser("model", help="look at or rewrite a model directory").add_subparsers(required=True, metavar="ACT")
    inspect = model.add_parser("inspect", help="check a model directory against its config and describe it as JSON")
    inspect.add_argument("directory", metavar="DIR", type=Path)
    inspect.set_defaults(act=run_model_inspect)
    export = model.add_parser("export", help="as a Zrodlo model directory or checkpoint, into a new directory")
    export.add_argument("directory", metavar="DIR", type=Path)
    export.add_argument("--out", required=True, metavar="DIR", type=Path, help="a directory that does not exist yet")
    export.add_argument("--layout", choices=(LAYOUT_WHOLE, LAYOUT_BARE), default=LAYOUT_WHOLE, help="names of the whole model, or bare ones")
    export.add_argument("--n-inner", metavar="WIDTH", help="where a GPT-2 config leaves the width open: 4x, or a number")
    export.add_argument("--checkpoint", action="store_true", help="with optimizer.safetensors and trainer.json, from a checkpoint of ours")
    export.set_defaults(act=run_model_export)


def run_corpus_build(asked: argparse.Namespace) -> TrainerExit:
    build_corpus(asked.sources, asked.tokenizer, asked.out, end_of_sequence=asked.eos, text_key=asked.text_key)
    _tell(_corpus_facts(open_zrodlo_corpus(asked.out)))
    return TrainerExit.FINISHED


def run_corpus_inspect(asked: argparse.Namespace) -> TrainerExit:
    _tell(_corpus_facts(open_zrodlo_corpus(asked.directory)))
    return TrainerExit.FINISHED


def run_model_inspect(asked: argparse.Namespace) -> TrainerExit:
    found = read_model_directory(asked.directory)
    _tell({
        "model_type": found.config["model_type"], "parameters": found.parameters, "tensors": len(found.names), "files": list(found.files),
        "dtypes": list(found.dtypes), "layout": LAYOUT_BARE if found.is_bare else LAYOUT_WHOLE, "tied": is_tied(found.config),
        "assumed": list(found.assumptions()),
    })
    return TrainerExit.FINISHED


def run_model_export(asked: argparse.Namespace) -> TrainerExit:
    if asked.checkpoint:
        _tell({"out": str(asked.out), "steps": export_checkpoint(asked.directory, asked.out).steps, "chosen": []})
    else:
        chosen = export_model(asked.directory, asked.out, layout=asked.layout, n_inner=asked.n_inner)
        _tell({"out": str(asked.out), "chosen": list(chosen)})
    return TrainerExit.FINISHED


def _corpus_facts(corpus: ZrodloCorpus) -> dict[str, Any]:
    files = dict.fromkeys(source["file"] for source in corpus.described["sources"])
    return {
        **{key: value for key, value in corpus.described.items() if key != "sources"}, "source_files": len(files),
        "first_tokens": corpus.tokens[:FIRST_TOKENS].tolist(), "tokenizer_is_there": corpus.tokenizer is not None,
    }


def _tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False))
