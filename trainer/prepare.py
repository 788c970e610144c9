"""From settings to a training that is ready to take its next step: model, optimizer, data, and the state of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import CHECKPOINTS, Checkpoint
from trainer.compiled import compile_body, compiler_facts
from trainer.config import SAMPLER_ZXELL, TASK_NAME, ModelSettings, TrainTask
from trainer.data.sampler import WindowSampler
from trainer.data.shards import Corpus, documents
from trainer.data.zxell_sampler import ZxellSampler
from trainer.environment import RunEnvironment
from trainer.fingerprint import choose_device, fingerprint, limit_memory, make_strict
from trainer.loop import Training
from trainer.memory import check_memory
from trainer.models.build import build_model, load_model_directory
from trainer.models.families import CONFIG_NAME, TOKENIZER_NAMES
from trainer.products import quicken
from trainer.records import RunRecords
from trainer.state import TrainingState, make_optimizer
from trainer.stopping import Stop

ORDERS = {"permutation": "keyed permutation of windows, blake2b, 6 rounds", SAMPLER_ZXELL: "zxell: PCG64, shard by tokens, then start"}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def prepare_training(
    environment: RunEnvironment, task: TrainTask, config: dict[str, Any], train: Corpus, validation: Corpus | None,
    resume: Checkpoint | None, stop: Stop, records: RunRecords, *, elsewhere: bool = False,
) -> Training:
    """A training at the step of `resume`, or at step 0. `elsewhere`: the environment may be another than that of `resume`.
    The random streams are set last: nothing may draw after them."""
    where = str(environment.run_dir / TASK_NAME)
    make_strict(task.threads)
    device = choose_device(task.device, task.precision, where=where)
    limit_memory(device, environment.memory_cap_bytes)
    model = build_model(config, seed=task.seed)
    if task.model.path is not None and resume is None:
        load_model_directory(model, Path(task.model.path))
    model.to(device).train()
    if not task.compile:  # a compiler finds its own way for the layers of the body
        quicken(model)
    sampler: Any = (ZxellSampler if task.sampler == SAMPLER_ZXELL else WindowSampler)(train, length=task.window, seed=task.seed)
    state = TrainingState(
        model=model, optimizer=make_optimizer(model, task.optimizer), files=_model_files(task.model, config, train),
        identity=_identity(task, config, train, validation, device, where=where), validation_due=validation is not None,
        sampler=sampler if isinstance(sampler, ZxellSampler) else None,
    )
    check_memory(state, task, device, cap_bytes=environment.memory_cap_bytes, where=environment.run_dir)
    training = Training(
        task=task, state=state, sampler=sampler, stop=stop, records=records,
        run_dir=environment.run_dir, validation=validation, memory_cap_bytes=environment.memory_cap_bytes,
        scored=tuple(documents(validation, task.validation_data.tokens_per_document_max)) if validation and task.validation_data else (),
    )
    if task.compile:
        compile_body(model, task, step=resume.step if resume else 0, records=records, where=where)
    if resume is not None:
        state.restore(resume.path, elsewhere=elsewhere)
        training.resumed = resume
        # A checkpoint from elsewhere is a parent, not one of ours: this run then begins by saving it here.
        if resume.path.absolute().parent == (environment.run_dir / CHECKPOINTS).absolute():
            training.saved = resume
    return training


def _identity(
    task: TrainTask, config: dict[str, Any], train: Corpus, validation: Corpus | None, device: torch.device, *, where: str,
) -> dict[str, Any]:
    data: dict[str, Any] = {"train": {"digest": train.digest, "split": train.split}}
    if validation is not None and task.validation_data is not None:
        cut = task.validation_data.tokens_per_document_max
        data["validation"] = {"digest": validation.digest, "split": validation.split, "tokens_per_document_max": cut}
    if train.tokenizer is not None:
        data["tokenizer_sha256"] = hashlib.sha256(train.tokenizer.read_bytes()).hexdigest()
    return {
        "settings": task.exact_settings(), "data": data, "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "order": ORDERS[task.sampler],
        "schedule": "linear warm-up, cosine to min_lr_ratio, closed form of the step",
        "environment": fingerprint(device, threads=task.threads, precision=task.precision)
        | ({"compile": compiler_facts(where=where)} if task.compile else {}),
    }


def _model_files(settings: ModelSettings, config: dict[str, Any], train: Corpus) -> dict[str, bytes]:
    """config.json with every key that was given, and the tokenizer: what makes a checkpoint a model directory."""
    described = {"architectures": [ARCHITECTURES[config["model_type"]]], **config}
    files = {CONFIG_NAME: (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode()}
    if settings.path is not None:
        for name in TOKENIZER_NAMES:
            if (Path(settings.path) / name).is_file():
                files[name] = (Path(settings.path) / name).read_bytes()
    if train.tokenizer is not None and train.tokenizer.name in TOKENIZER_NAMES:
        files.setdefault(train.tokenizer.name, train.tokenizer.read_bytes())
    return files
