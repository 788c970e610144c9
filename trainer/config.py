"""task.json into frozen settings: what to train or to evaluate, on which data, how.

    TrainTask     task "language_model"            model, data.train, data.validation, window, batch, steps, optimizer, ...
    EvaluateTask  task "evaluate_language_model"   split, data.train, data.<split>, models.selected, models.base

No torch here: a wrong key must not cost the seconds of an import.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies.errors import PlanInvalid
from trainer.files import JsonFault, read_json
from trainer.reading import Reader

TASK_NAME = "task.json"
TASK_TRAIN = "language_model"
TASK_EVALUATE = "evaluate_language_model"
SAMPLER_OURS, SAMPLER_ZXELL = "permutation", "zxell"
DATA_FORMATS = ("zxell", "zrodlo")
THREADS_MAX = 1024
STEPS_MAX = 10**9 - 1
SEED_MAX = 2**63 - 1
PROOF_KEEP_MIN = 2
"""The end of a training and the checkpoint before it."""
SCORED_SPLITS = ("validation", "calibration", "test", "holdout")
DEVICES_HELP = "auto, cpu, cuda or cuda:N"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """One role's directory of token shards. `split` is its name in shards_index.json."""

    path: str
    split: str
    digest: str | None = None
    """What the directory has to be, as `policies.manifest` counts; None: whatever it is, recorded."""
    tokens_per_document_max: int | None = None
    """For scored roles: only the first tokens of each document are scored."""
    format: str | None = None
    """zxell or zrodlo; None: whichever the directory is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Either a fresh model from a Transformers `config`, or the weights of the model directory at `path`."""

    config: dict[str, Any] | None = None
    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    lr: float
    min_lr_ratio: float = 0.1
    warmup: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    """Greatest norm of all gradients together; None: they are taken as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    every_steps: int | None = None
    every_seconds: float | None = 900.0
    keep: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSettings:
    """The unchanged base and the last step are always validated."""

    every_steps: int | None = None
    patience: int | None = None
    """So many validations in a row without the minimum improvement end the training."""
    batch: int = 16
    minimum_improvement: float = 0.001
    """In nats; what the selection later asks of a checkpoint that replaces an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """At its end a fresh process takes the last steps of the training again (trainer.gate)."""

    steps: int
    required: bool = False
    """Told with the verdict: an inexact run is then not selectable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    model: ModelSettings
    train: DataSettings
    validation_data: DataSettings | None
    window: int
    batch: int
    micro_batch: int
    steps: int
    seed: int
    optimizer: OptimizerSettings
    checkpoint: CheckpointSettings
    validation: ValidationSettings
    threads: int = 1
    device: str = "auto"
    precision: str = "fp32"
    log_every: int = 1
    sampler: str = SAMPLER_OURS
    """How the training draws its windows: ours, or as zxell does."""
    compile: bool = False
    """The model's body goes through torch.compile (trainer.compiled)."""
    pilot_steps: int | None = None
    """So many steps are a pilot: a fresh process checks them before the run goes on (trainer.pilot)."""
    proof: ProofSettings | None = None

    @property
    def proof_from_step(self) -> int | None:
        """The last checkpoint before the end, so that the proof finds one on either side of its steps."""
        return self.steps - self.proof.steps if self.proof is not None else None

    def exact_settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one before it. Cadences of saving and logging may change; numbers may not."""
        return {
            "model": {"config": self.model.config} if self.model.config is not None else {"base_digest": self.model.digest},
            "window": self.window, "batch": self.batch, "micro_batch": self.micro_batch, "steps": self.steps, "seed": self.seed,
            "optimizer": {**asdict(self.optimizer), "betas": list(self.optimizer.betas)}, "precision": self.precision,
            **({} if self.sampler == SAMPLER_OURS else {"sampler": self.sampler}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTask:
    split: str
    train: DataSettings
    scored: DataSettings
    models: dict[str, ModelSettings]
    """By name, in the order in which they are scored: `selected`, `base`."""
    window: int
    batch: int = 16
    threads: int = 1
    device: str = "auto"
    precision: str = "fp32"


def read_task(run_dir: Path) -> TrainTask | EvaluateTask:
    """The settings in a run directory. PlanInvalid tells every fault of the file at once."""
    path = run_dir / TASK_NAME
    try:
        body = read_json(path)
    except FileNotFoundError as fault:
        raise PlanInvalid("there is nothing to train", where=str(path), what="the run directory holds no task.json",
                          fix="name the run directory as an argument or in FLEETD_RUN_DIR") from fault
    except (OSError, JsonFault) as fault:
        raise PlanInvalid("the task can't be read", where=str(path), what=str(fault),
                          fix="write it again from the plan: fleetd launch PLAN") from fault
    return parse_task(body, where=str(path))


def parse_task(body: Any, *, where: str) -> TrainTask | EvaluateTask:
    """The settings that a JSON value describes. PlanInvalid tells every fault at once."""
    faults: list[str] = []
    task: TrainTask | EvaluateTask | None = None
    if not isinstance(body, dict):
        faults.append(f"an object is needed, not {type(body).__name__}")
    else:
        reader = Reader(body, "", faults)
        reader.integer("schema", minimum=1, maximum=1)
        kind = reader.text("task", choices=(TASK_TRAIN, TASK_EVALUATE))
        if kind == TASK_EVALUATE:
            task = _evaluate_task(reader)
        elif kind == TASK_TRAIN:
            task = _train_task(reader)
    if faults or task is None:
        raise PlanInvalid("the task can't be carried out", where=where, what="; ".join(faults), fix="correct these keys in the plan and launch again")
    return task


def _train_task(reader: Reader) -> TrainTask | None:
    model, data, optimizer = reader.section("model"), reader.section("data"), reader.section("optimizer")
    checkpoint, validation = reader.section("checkpoint", required=False), reader.section("validation", required=False)
    train = _data(data.section("train"), scored=False) if data else None
    scored = _data(data.section("validation", required=False), scored=True) if data else None
    if data:
        data.finish()
    window, batch = reader.integer("window", minimum=1), reader.integer("batch", minimum=1)
    steps = reader.integer("steps", minimum=1, maximum=STEPS_MAX)
    task = {
        "micro_batch": reader.integer("micro_batch", minimum=1, default=None), "seed": reader.integer("seed", minimum=0, maximum=SEED_MAX),
        "log_every": reader.integer("log_every", minimum=1, default=1), **_machine(reader),
        "compile": reader.flag("compile", default=False),
        "sampler": reader.text("sampler", choices=(SAMPLER_OURS, SAMPLER_ZXELL), default=SAMPLER_OURS),
    }
    model_settings, optimizer_settings = _model(model), _optimizer(optimizer)
    cadence, validating = _checkpoint(checkpoint), _validation(validation)
    task["pilot_steps"] = _pilot(reader.section("pilot", required=False))
    task["proof"] = proof = _proof(reader.section("proof", required=False))
    reader.finish()
    if reader.faults or train is None or model_settings is None or optimizer_settings is None:
        return None
    task["micro_batch"] = task["micro_batch"] or batch
    if batch % task["micro_batch"]:
        reader.faults.append(f"micro_batch: {task['micro_batch']} does not divide batch {batch}")
    if optimizer_settings.warmup >= steps:
        reader.faults.append(f"optimizer.warmup: {optimizer_settings.warmup} steps of warm-up leave none of {steps} steps")
    if task["pilot_steps"] is not None and (scored is None or task["pilot_steps"] >= steps):
        reader.faults.append("pilot: it needs validation data, whose predictions it compares, and fewer steps than the training")
    if proof is not None and (proof.steps >= steps or cadence.keep < PROOF_KEEP_MIN):
        reader.faults.append(f"proof: it needs fewer steps than the training, and checkpoint.keep of at least {PROOF_KEEP_MIN}")
    return TrainTask(model=model_settings, train=train, validation_data=scored, window=window, batch=batch, steps=steps,
                     optimizer=optimizer_settings, checkpoint=cadence, validation=validating, **task)


def _evaluate_task(reader: Reader) -> EvaluateTask | None:
    split = reader.text("split", choices=SCORED_SPLITS)
    data, models = reader.section("data"), reader.section("models")
    train = _data(data.section("train"), scored=False) if data else None
    scored = _data(data.section(split), scored=True) if data and split in SCORED_SPLITS else None
    named = {name: _model(models.section(name)) for name in ("selected", "base")} if models else {}
    for section in (data, models):
        if section:
            section.finish()
    window, batch = reader.integer("window", minimum=1), reader.integer("batch", minimum=1, default=16)
    machine = _machine(reader)
    reader.finish()
    if reader.faults or train is None or scored is None:
        return None
    return EvaluateTask(split=split, train=train, scored=scored, models={name: model for name, model in named.items() if model},
                        window=window, batch=batch, **machine)


def _machine(reader: Reader) -> dict[str, Any]:
    device = reader.text("device", default="auto")
    if not (device in ("auto", "cpu", "cuda") or (device.startswith("cuda:") and device[5:].isdigit())):
        reader.faults.append(f"device: {device!r} is none of {DEVICES_HELP}")
    return {
        "threads": reader.integer("threads", minimum=1, maximum=THREADS_MAX, default=1), "device": device,
        "precision": reader.text("precision", choices=("fp32", "bf16"), default="fp32"),
    }


def _data(reader: Reader | None, *, scored: bool) -> DataSettings | None:
    if reader is None:
        return None
    settings = {"path": reader.text("path"), "split": reader.text("split"), "digest": reader.text("digest", default=None),
                "format": reader.text("format", choices=DATA_FORMATS, default=None)}
    if scored:
        settings["tokens_per_document_max"] = reader.integer("tokens_per_document_max", minimum=1, default=None)
    reader.finish()
    return DataSettings(**settings)


def _model(reader: Reader | None) -> ModelSettings | None:
    if reader is None:
        return None
    config, path, digest = reader.section("config", required=False), reader.text("path", default=None), reader.text("digest", default=None)
    if (config is None) == (path is None):
        reader.faults.append(f"{reader.path}: either config or path is needed, and not both")
    reader.finish()
    return ModelSettings(config=config.body if config else None, path=path, digest=digest)


def _optimizer(reader: Reader | None) -> OptimizerSettings | None:
    if reader is None:
        return None
    settings = OptimizerSettings(
        lr=reader.number("lr", above=0.0), min_lr_ratio=reader.number("min_lr_ratio", minimum=0.0, maximum=1.0, default=0.1),
        warmup=reader.integer("warmup", minimum=0, default=0), weight_decay=reader.number("weight_decay", minimum=0.0, default=0.1),
        betas=reader.pair("betas", default=(0.9, 0.95)), eps=reader.number("eps", above=0.0, default=1e-8),
        clip=reader.number("clip", above=0.0, default=1.0) if reader.body.get("clip", 1.0) is not None else reader.anything("clip"),
    )
    reader.finish()
    return settings


def _checkpoint(reader: Reader | None) -> CheckpointSettings:
    if reader is None:
        return CheckpointSettings()
    by_time = None if reader.body.get("every_seconds", 0) is None else CheckpointSettings().every_seconds  # null: not by time
    settings = CheckpointSettings(
        every_steps=reader.integer("every_steps", minimum=1, default=None), every_seconds=reader.number("every_seconds", above=0.0, default=by_time),
        keep=reader.integer("keep", minimum=1, maximum=1000, default=2),
    )
    reader.finish()
    return settings


def _pilot(reader: Reader | None) -> int | None:
    if reader is None:
        return None
    steps: int = reader.integer("steps", minimum=1, maximum=STEPS_MAX)
    reader.finish()
    return steps


def _proof(reader: Reader | None) -> ProofSettings | None:
    if reader is None:
        return None
    settings = ProofSettings(steps=reader.integer("steps", minimum=1, maximum=STEPS_MAX), required=reader.flag("required", default=False))
    reader.finish()
    return settings


def _validation(reader: Reader | None) -> ValidationSettings:
    if reader is None:
        return ValidationSettings()
    settings = ValidationSettings(
        every_steps=reader.integer("every_steps", minimum=1, default=None), patience=reader.integer("patience", minimum=1, default=None),
        batch=reader.integer("batch", minimum=1, default=16),
        minimum_improvement=reader.number("minimum_improvement", minimum=0.0, default=0.001),
    )
    reader.finish()
    return settings
