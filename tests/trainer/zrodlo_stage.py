"""What the tests of Zrodlo's formats stand on: a small real tokenizer, sources in both forms, corpora and directories made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.formats.zrodlo_build import build_corpus

SENTENCE = "the mill turns slowly while water falls over old stones and nobody counts how often it went around since spring"
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[start % 7:start % 7 + 5 + start]) for start in range(14)]
END = "</s>"


def make_tokenizer(path: Path, **changes: Any) -> Path:
    """A word-level tokenizer.json as the library writes it; `changes` are put into the file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<pad>": 1, **{word: number for number, word in enumerate(dict.fromkeys(WORDS), start=2)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END])
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return path


def make_sources(folder: Path) -> list[Path]:
    """Two plain files and a JSON Lines file of the remaining texts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.txt").write_text(TEXTS[1])
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text, "more": number}) + "\n" for number, text in enumerate(TEXTS[2:])))
    return [folder / "a.txt", folder / "b.txt", folder / "c.jsonl"]


def make_corpus(root: Path, name: str = "corpus") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(root / "tokenizer.json")
    build_corpus(make_sources(root / "sources"), tokenizer, root / name)
    return root / name
