"""A plan may name Zrodlo corpora: registered row by row as token shards are, and refused where they are not what corpus.json says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign_kit import make_plan

from fleetd.campaign import DataRole
from fleetd.coordinator.corpora import check_corpus_vocabulary
from fleetd.coordinator.registration import register_rows
from fleetd.coordinator.staging import check_disjoint, collect_role
from policies.errors import DataDamaged, RequestRefused
from policies.facts import Split

END = 7
FILES = ("corpus.json", "tokens.bin", "tokenizer.json")
DOCUMENTS = ([3, 4, END], [5, END], [3, 3, 3, 6, END])


def make_corpus(folder: Path, texts: tuple[list[int], ...] = DOCUMENTS, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    tokens = np.concatenate([np.array(each, dtype="<u4") for each in texts]).tobytes()
    (folder / "tokens.bin").write_bytes(tokens)
    (folder / "tokenizer.json").write_text('{"a tokenizer": 1}')
    described = {"schema": 1, "sources": [{"file": f"{number}.txt"} for number in range(len(texts))], "tokenizer_sha256": "0" * 64,
                 "end_of_sequence": END, "vocabulary": 8, "documents": len(texts), "tokens": len(tokens) // 4,
                 "tokens_sha256": hashlib.sha256(tokens).hexdigest(), **changes}
    (folder / "corpus.json").write_text(json.dumps(described))
    return folder


def role(split: Split, name: str, **changes: Any) -> DataRole:
    return DataRole(split=split, path=name, include=FILES, is_corpus=True, **changes)


def test_every_document_is_registered_with_its_tokens_cut_to_what_is_scored(tmp_path: Path) -> None:
    make_corpus(tmp_path / "val")
    found = register_rows(collect_role(str(tmp_path), role(Split.VALIDATION, "val", tokens_per_document_max=4)))
    assert [(row.id, row.family, row.tokens) for row in found.rows] == [("tokens:0", "all", 3), ("tokens:1", "all", 2), ("tokens:2", "all", 4)]
    assert found.shard_split == "validation", "a corpus has no other name for its split"


def test_two_corpora_may_share_their_tokenizer_but_not_their_tokens(tmp_path: Path) -> None:
    make_corpus(tmp_path / "train")
    make_corpus(tmp_path / "test", ([4, END],))
    make_corpus(tmp_path / "leaked")
    train, test, leaked = (collect_role(str(tmp_path), role(split, name)) for split, name in (
        (Split.TRAIN, "train"), (Split.TEST, "test"), (Split.TEST, "leaked")))
    check_disjoint((train, test))
    with pytest.raises(RequestRefused, match="share a file"):
        check_disjoint((train, leaked))


@pytest.mark.parametrize(("changes", "told"), [
    ({"tokens": 9}, "40 bytes, 9 tokens need 36"), ({"tokens_sha256": "0" * 64}, "its SHA-256 is"), ({"documents": 2}, "3 end-of-sequence tokens"),
    ({"end_of_sequence": None}, "end_of_sequence is missing, or no int"),
])
def test_a_corpus_that_is_not_what_it_says_stops_the_launch(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    make_corpus(tmp_path / "val", **changes)
    with pytest.raises(DataDamaged, match=told):
        register_rows(collect_role(str(tmp_path), role(Split.VALIDATION, "val")))


def test_tokens_that_a_model_does_not_know_are_named_by_their_place(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "train")
    check_corpus_vocabulary(folder, {"large": 8})
    with pytest.raises(RequestRefused) as caught:
        check_corpus_vocabulary(folder, {"large": 8, "small": 7})
    assert caught.value.what == "token 7 at offset 8 is beyond the vocabulary of small"


def test_a_plan_without_corpora_is_as_it_was(tmp_path: Path) -> None:
    assert not any(each.is_corpus for each in make_plan(tmp_path).data)
