"""Text from a model: what it writes after a prompt, one token drawn after another from a generator of its own.

The seed says it all: the same model, prompt, settings and seed give the same text, and no stream of a training is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policies.errors import LossNotFinite, PlanInvalid
from trainer.data.shards import END_OF_SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """`temperature` 0 takes the likeliest token each time; `top` keeps the likeliest so many, None all."""

    tokens_max: int = 200
    temperature: float = 1.0
    top: int | None = None
    seed: int = 0
    stops_at_end: bool = True


def sample_tokens(model: nn.Module, prompt: list[int], settings: SampleSettings, *, window: int) -> list[int]:
    """What follows `prompt` (the end of an article before it, as in training), its end-of-sequence token included if it came."""
    generator = torch.Generator().manual_seed(settings.seed)
    tokens, device, was_training = [END_OF_SEQUENCE, *prompt], next(model.parameters()).device, model.training
    first = len(tokens)
    model.eval()
    try:
        with torch.no_grad():
            while len(tokens) - first < settings.tokens_max:
                seen = torch.tensor([tokens[-window:]], device=device)
                tokens.append(_draw(model(input_ids=seen, use_cache=False).logits[0, -1].float().cpu(), settings, generator))
                if settings.stops_at_end and tokens[-1] == END_OF_SEQUENCE:
                    break
    finally:
        model.train(was_training)
    return tokens[first:]


def load_pieces(path: Path) -> Any:
    """The SentencePiece model of a file. PlanInvalid when it is none."""
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as fault:
        raise PlanInvalid("the tokenizer can't be read", where=str(path), what=f"it is no SentencePiece model: {fault!s:.200}",
                          fix="name the tokenizer.model that the model was trained with: --tokenizer FILE") from fault


def _draw(logits_V: torch.Tensor, settings: SampleSettings, generator: torch.Generator) -> int:  # noqa: N803
    if not math.isfinite(float(logits_V.max())):
        raise LossNotFinite("the model gives no numbers", where="sample", what="a logit is nan or inf", fix="sample from an older checkpoint")
    if settings.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / settings.temperature
    if settings.top is not None and settings.top < len(logits_V):
        least = torch.topk(logits_V, settings.top).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -math.inf)
    return int(torch.multinomial(torch.softmax(logits_V, dim=-1), 1, generator=generator))
