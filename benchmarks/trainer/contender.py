"""One contender in a process of its own: it trains for as many steps as it is told, says how long they took, and waits.

    python contender.py ours|trainer|plain|matmul|onednn CELL.json SHARDS WORK --ask FD --tell FD

Words on --ask are numbers of steps; each is answered on --tell with the seconds from the word to the end of the last step, by the wall
and of this process's own on the processors.
What a contender does between two steps (fetching data, logging, asking whether to stop) lies within that time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import stage

WARM_STEPS = 2
MATMUL_SIZE = 1024
MATMUL_REPEATS = 20


class Turns:
    """The step loop asks here after each step. The first turn, unasked, is the warm-up."""

    def __init__(self, ask: int, tell: int) -> None:
        self._ask, self._tell = os.fdopen(ask), os.fdopen(tell, "w")
        self._left, self._began, self.losses = WARM_STEPS, (time.monotonic(), time.process_time()), []

    def step_done(self, loss: float | None = None) -> None:
        if loss is not None:
            self.losses.append(loss)
        self._left -= 1
        if self._left > 0:
            return
        wall, processor = time.monotonic() - self._began[0], time.process_time() - self._began[1]
        self.say({"wall": wall, "processor": processor, "losses": self.losses})
        word = self._ask.readline().strip()
        if not word:
            os._exit(0)  # it is over: in the middle of somebody's loop there is no other way out
        self._left, self._began = int(word), (time.monotonic(), time.process_time())

    def say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._tell, flush=True)


def ours(cell: stage.Cell, shards: Path, work: Path, turns: Turns) -> None:
    """`fleetd-trainer train`, all of it; the stop that it asks between steps is where the turns come in."""
    (work / "task.json").write_text(json.dumps(stage.task(cell, shards)))
    from trainer import __main__ as command
    from trainer.config import TrainTask, read_task
    from trainer.environment import read_environment
    from trainer.stopping import Stop

    class Paced(Stop):
        def note_step(self, seconds: float) -> None:
            super().note_step(seconds)
            turns.step_done()

    settings = read_task(work)
    assert isinstance(settings, TrainTask)
    command.train(read_environment({}, str(work)), settings, Paced())


def windows_of(cell: stage.Cell, shards: Path) -> Any:
    """The windows in the order in which our trainer takes them, as one tensor: the others pay nothing for reading."""
    import torch

    from trainer.data.sampler import WindowSampler
    from trainer.data.shards import open_corpus

    sampler = WindowSampler(open_corpus(shards, "train", vocabulary=cell.vocabulary), length=cell.window, seed=stage.SEED)
    return torch.from_numpy(sampler.batch(0, min(sampler.window_count, 200 * cell.batch)))


def built(cell: stage.Cell) -> Any:
    import torch

    torch.set_num_threads(cell.threads)
    from trainer.models.build import build_model

    return build_model(stage.model_config(cell), seed=stage.SEED).train()


def plain(cell: stage.Cell, shards: Path, work: Path, turns: Turns) -> None:
    """What a person would write who knows PyTorch: the library's loss and its fused AdamW, nothing held back."""
    import torch
    import torch.nn.functional as functional

    model, windows_BT = built(cell), windows_of(cell, shards)
    weights, settings = list(model.parameters()), stage.OPTIMIZER
    groups = [{"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": settings["weight_decay"]},
              {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings["eps"], fused=True)
    for batch_BT in torch.split(windows_BT, cell.batch):
        logits_BTV = model(input_ids=batch_BT[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits_BTV.view(-1, cell.vocabulary), batch_BT[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, settings["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.step_done(loss.item())


def hugging_face(cell: stage.Cell, shards: Path, work: Path, turns: Turns) -> None:
    """`transformers.Trainer` with its own defaults wherever the arithmetic does not ask for something."""
    import transformers

    model, windows_BT, settings = built(cell), windows_of(cell, shards), stage.OPTIMIZER
    rows = [{"input_ids": window[:-1], "labels": window[:-1], "shift_labels": window[1:]} for window in windows_BT]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *given: Any, **named: Any) -> Any:
            return range(len(rows))

    class Paced(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            turns.step_done()

        def on_log(self, *given: Any, logs: dict[str, Any] | None = None, **named: Any) -> None:
            if logs and "loss" in logs:
                turns.losses.append(float(logs["loss"]))

    arguments = transformers.TrainingArguments(
        output_dir=str(work), per_device_train_batch_size=cell.batch, max_steps=len(rows) // cell.batch, learning_rate=settings["lr"],
        lr_scheduler_type="constant", weight_decay=settings["weight_decay"], adam_beta1=settings["betas"][0], adam_beta2=settings["betas"][1],
        adam_epsilon=settings["eps"], max_grad_norm=settings["clip"], logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False, seed=stage.SEED,
    )
    InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Paced()]).train()


def matmul(cell: stage.Cell, shards: Path, work: Path, turns: Turns) -> None:
    """The machine's limit as torch's own product has it: square products into memory that is there already. A step here is a block of them."""
    import torch

    torch.set_num_threads(cell.threads)
    left, right = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    out = torch.empty(MATMUL_SIZE, MATMUL_SIZE)
    while True:
        for _ in range(MATMUL_REPEATS):
            torch.mm(left, right, out=out)
        turns.step_done()


def onednn(cell: stage.Cell, shards: Path, work: Path, turns: Turns) -> None:
    """The same products by the way that our training takes."""
    import torch

    from trainer.environment import keep_big_blocks
    from trainer.products import times

    keep_big_blocks()
    torch.set_num_threads(cell.threads)
    left, right = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    while True:
        for _ in range(MATMUL_REPEATS):
            times(left, right)
        turns.step_done()


CONTENDERS = {"ours": ours, "trainer": hugging_face, "plain": plain, "matmul": matmul, "onednn": onednn}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=CONTENDERS)
    parser.add_argument("cell")
    parser.add_argument("shards")
    parser.add_argument("work")
    parser.add_argument("--ask", type=int, required=True)
    parser.add_argument("--tell", type=int, required=True)
    given = parser.parse_args()
    cell = stage.Cell(**json.loads(given.cell))
    CONTENDERS[given.who](cell, Path(given.shards), Path(given.work), Turns(given.ask, given.tell))


if __name__ == "__main__":
    main()
