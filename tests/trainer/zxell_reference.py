"""zxell as `formats.md` part A describes it, written from that page alone: it shares no line with the trainer that is tested.

A model, a sampler, a training, an evaluation, a writer of run directories and shards, and readers that believe nothing.
`python tests/trainer/zxell_reference.py DIR` writes the small samples that lie in tests/data/zxell.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

LANGUAGES = ("en", "de", "fr", "ja")
TINY = {"n_layer": 2, "d_model": 16, "n_head": 2, "ctx": 16, "vocab_size": 48, "rope_theta": 10000.0, "tie_embeddings": True}
ARGS = {
    "preset": None, "shards": "shards", "out": "run", "steps": 40, "batch": 2, "grad_accum": 2, "ctx": 16, "lr": 0.01, "min_lr_ratio": 0.1,
    "warmup": 5, "wd": 0.1, "clip": 1.0, "eval_every": 20, "eval_tokens": 200, "final_eval_tokens": 400, "ckpt_every": 10, "log_every": 10,
    "device": "cpu", "seed": 431, "resume": False, "max_train_shards": None,
}


def hidden_width(width: int) -> int:
    exact = -(-8 * width // 3)
    return -(-exact // 64) * 64


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, theta: float) -> None:
        super().__init__()
        self.heads, self.theta = heads, theta
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        q, k = self.rotate(q), self.rotate(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -math.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[-2]).float(), self.theta ** (-torch.arange(half).float() / half))
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = hidden_width(width)
        self.w_gate, self.w_up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w_down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_down(functional.silu(self.w_gate(x)) * self.w_up(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.norm1 = Norm(config["d_model"])
        self.attn = Attention(config["d_model"], config["n_head"], config["rope_theta"])
        self.norm2 = Norm(config["d_model"])
        self.ffn = FeedForward(config["d_model"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Zxell(nn.Module):
    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config["vocab_size"], config["d_model"])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.norm_f = Norm(config["d_model"])
        self.lm_head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)
        torch.manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("attn.proj.weight", "w_down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config["n_layer"]) if small else 0.02)
        self.lm_head.weight = self.tok_emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm_f(x))


def rate(args: dict[str, Any], step: int) -> float:
    """Of the 0-based step."""
    if step < args["warmup"]:
        return args["lr"] * (step + 1) / args["warmup"]
    least, part = args["lr"] * args["min_lr_ratio"], (step - args["warmup"]) / (args["steps"] - args["warmup"])
    return least + 0.5 * (args["lr"] - least) * (1 + math.cos(math.pi * part))


def draw(generator: np.random.Generator, shards: list[np.ndarray], rows: int, ctx: int) -> np.ndarray:
    """The shard by the inverse of the cumulated chances, written out: what `choice` with chances stands for."""
    chances = np.array([len(shard) for shard in shards]) / sum(len(shard) for shard in shards)
    limits, windows = np.cumsum(chances) / np.cumsum(chances)[-1], []
    for _ in range(rows):
        shard = shards[int(np.sum(limits <= generator.random()))]
        start = int(generator.integers(0, len(shard) - ctx - 1))
        windows.append(shard[start:start + ctx + 1].astype(np.int64))
    return np.stack(windows)


class Training:
    """A zxell training in its own loop. `log` holds its records, `drawn` every window in order."""

    def __init__(self, config: dict[str, Any], args: dict[str, Any], shards: list[np.ndarray]) -> None:
        self.config, self.args, self.shards = config, args, shards
        self.model, self.generator = Zxell(config, args["seed"]), np.random.default_rng(args["seed"])
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW([
            {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": args["wd"]},
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ], lr=args["lr"], betas=(0.9, 0.95))
        self.step, self.log, self.drawn, self.losses = 0, [], [], []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = rate(self.args, self.step)
            total = 0.0
            for _ in range(self.args["grad_accum"]):
                windows = draw(self.generator, self.shards, self.args["batch"], self.args["ctx"])
                self.drawn.append(windows)
                tokens = torch.from_numpy(windows)
                logits = self.model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / self.args["grad_accum"]
                loss.backward()
                total += loss.item()
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.args["clip"]))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.losses.append(total)
            if self.step == 1 or self.step % self.args["log_every"] == 0:
                self.log.append({"step": self.step, "loss": total, "lr": rate(self.args, self.step - 1), "grad_norm": norm, "tok_per_s": 1.0,
                                 "elapsed_s": float(self.step)})

    def save(self, folder: Path, names: list[str]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model": self.config, "args": self.args, "train_shards": names}, indent=2))
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.log))
        (folder / "stdout.log").write_text("")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "sampler": {"rng": self.generator.bit_generator.state},
                    "step": self.step, "config": self.config, "args": self.args}, folder / "ckpt_last.pt")
        return folder

    @classmethod
    def load(cls, folder: Path, shards: list[np.ndarray]) -> Training:
        """Go on from a run directory, whoever wrote it."""
        described = json.loads((folder / "config.json").read_text())
        body = torch.load(folder / "ckpt_last.pt", weights_only=True)
        assert set(body) == {"model", "optimizer", "sampler", "step", "config", "args"}
        assert body["config"] == described["model"]
        again = cls(described["model"], described["args"], shards)
        again.model.load_state_dict(body["model"], strict=True)
        again.optimizer.load_state_dict(body["optimizer"])
        again.generator.bit_generator.state = body["sampler"]["rng"]
        again.step = body["step"]
        return again


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The list of the page, spelled out."""
    width, hidden, shapes = config["d_model"], hidden_width(config["d_model"]), {"tok_emb.weight": (config["vocab_size"], config["d_model"])}
    for layer in range(config["n_layer"]):
        shapes |= {
            f"blocks.{layer}.norm1.weight": (width,), f"blocks.{layer}.attn.qkv.weight": (3 * width, width),
            f"blocks.{layer}.attn.proj.weight": (width, width), f"blocks.{layer}.norm2.weight": (width,),
            f"blocks.{layer}.ffn.w_gate.weight": (hidden, width), f"blocks.{layer}.ffn.w_up.weight": (hidden, width),
            f"blocks.{layer}.ffn.w_down.weight": (width, hidden),
        }
    return shapes | {"norm_f.weight": (width,), "lm_head.weight": (config["vocab_size"], config["d_model"])}


def check_run(folder: Path) -> dict[str, Any]:
    """Everything the page says of a run directory. Returns the content of its newest checkpoint."""
    described = json.loads((folder / "config.json").read_text())
    assert set(described) == {"model", "args", "train_shards"}
    assert set(described["model"]) == set(TINY)
    assert set(ARGS) <= set(described["args"])
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        keys = {"step", "eval", "all", *LANGUAGES} if "eval" in record else {"step", "loss", "lr", "grad_norm", "tok_per_s", "elapsed_s"}
        assert set(record) == keys
        assert "eval" in record or record["step"] == 1 or record["step"] % 10 == 0
    body = torch.load(folder / "ckpt_last.pt", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in body["model"].items()} == expected_shapes(described["model"])
    assert body["model"]["lm_head.weight"].data_ptr() == body["model"]["tok_emb.weight"].data_ptr()
    assert body["sampler"]["rng"]["bit_generator"] == "PCG64"
    return dict(body)


def perplexities(model: Zxell, tokens: np.ndarray, codes: bytes, ctx: int) -> dict[str, float]:
    """One window after another, one target after another."""
    article_of, article, sums, counts = [], 0, dict.fromkeys((*LANGUAGES, "all"), 0.0), dict.fromkeys((*LANGUAGES, "all"), 0)
    for token in tokens:
        article_of.append(article)
        article += int(token == 2)
    for start in range(0, len(tokens) - ctx, ctx + 1):
        window = torch.from_numpy(tokens[start:start + ctx + 1].astype(np.int64))
        with torch.no_grad():
            chances = model(window[None, :-1])[0].double().log_softmax(-1)
        for place in range(ctx):
            language = LANGUAGES[codes[article_of[start + place + 1]]]
            for key in (language, "all"):
                sums[key] -= float(chances[place, window[place + 1]])
                counts[key] += 1
    return {key: math.exp(sums[key] / counts[key]) for key in sums if counts[key]}


def write_shards(folder: Path, seed: int = 5) -> Path:
    """Two train shards, one of val and one of test, of synthetic articles."""
    folder.mkdir(parents=True)
    draws, entries = np.random.default_rng(seed), []
    for name, split, articles in (("train_000.bin", "train", 14), ("train_001.bin", "train", 9), ("val_000.bin", "val", 8),
        ("test_000.bin", "test", 8)):
        codes = [number % 4 for number in range(articles)]
        pieces = [np.append(draws.integers(3, 12, draws.integers(20, 60)) + 9 * code, 2).astype("<u2") for code in codes]
        data = np.concatenate(pieces).tobytes()
        entry = {"name": name, "split": split, "tokens": len(data) // 2, "docs": articles, "sha256": hashlib.sha256(data).hexdigest(),
                 "langs": {language: sum(len(p) for p, c in zip(pieces, codes, strict=True) if c == i) for i, language in enumerate(LANGUAGES)}}
        (folder / name).write_bytes(data)
        (folder / f"{name}.json").write_text(json.dumps(entry))
        if split != "train":
            (folder / f"{split}_000.langs.u8").write_bytes(bytes(codes))
        entries.append(entry)
    index = {"tokenizer": "tokenizer.model", "dtype": "uint16", "shard_tokens": 50_000_000, "seed": seed, "created": "2026-09-01T00:00:00Z",
             "boundaries": {"mode": "date", "_meta": {}}, "a key of tomorrow": 1, "shards": entries}
    (folder / "shards_index.json").write_text(json.dumps(index))
    return folder


def check_shards(folder: Path, vocabulary: int) -> dict[str, Any]:
    """Everything the page asks of a directory of shards. Returns the index."""
    index = json.loads((folder / "shards_index.json").read_text())
    assert index["dtype"] == "uint16"
    assert {"tokenizer", "shard_tokens", "seed", "created", "boundaries", "shards"} <= set(index)
    assert set(index["boundaries"]) >= {"mode", "test_docs", "val_docs", "computed_at", "snapshot", "langs", "_meta"}
    assert (folder / index["tokenizer"]).is_file()
    for entry in index["shards"]:
        data = (folder / entry["name"]).read_bytes()
        tokens = np.frombuffer(data, dtype="<u2")
        assert json.loads((folder / f"{entry['name']}.json").read_text()) == entry
        assert (len(tokens), hashlib.sha256(data).hexdigest()) == (entry["tokens"], entry["sha256"])
        assert int((tokens == 2).sum()) == entry["docs"]
        assert tokens[-1] == 2 and int(tokens.max()) < vocabulary
        assert sum(entry["langs"].values()) == entry["tokens"]
        if entry["split"] == "train":
            assert entry["tokens"] <= index["shard_tokens"]
            continue
        codes, counted, article = (folder / entry["name"].replace(".bin", ".langs.u8")).read_bytes(), dict.fromkeys(LANGUAGES, 0), 0
        assert len(codes) == entry["docs"]
        for token in tokens:
            counted[LANGUAGES[codes[article]]] += 1
            article += int(token == 2)
        assert counted == entry["langs"]
    return dict(index)


def train_shards(folder: Path) -> list[np.ndarray]:
    return [np.fromfile(path, dtype="<u2") for path in sorted(folder.glob("train_*.bin"))]


def write_samples(folder: Path) -> None:
    torch.set_num_threads(1)
    shards = write_shards(folder / "shards")
    training = Training(TINY, ARGS, train_shards(shards))
    training.go(20)
    val = shards / "val_000.bin"
    found = perplexities(training.model, np.fromfile(val, dtype="<u2"), (shards / "val_000.langs.u8").read_bytes(), ARGS["ctx"])
    training.log.append({"step": 20, "eval": "val", **found})
    training.save(folder / "run", ["train_000.bin", "train_001.bin"])


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
