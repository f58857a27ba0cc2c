"""Folders of tiny random sentence encoders, built from their configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = 40
WORDS = ["pain", "chest", "letter", "worse", "visit", "patient", "employer", "asked", "boat", "meals"]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FAMILIES = {
    "bert": (transformers.BertConfig, 0),
    "roberta": (transformers.RobertaConfig, 1),  # counts places by tokens that are no padding
    "mpnet": (transformers.MPNetConfig, 1),
    "distilbert": (transformers.DistilBertConfig, 0),
}


def tokenizer(padding: int) -> Any:
    """WordPiece between [CLS] and [SEP], with its padding token at place ``padding``."""
    letters = [start + chr(code) for start in ("", "##") for code in range(97, 123)]
    known = [*MARKS[1 : 1 + padding], MARKS[0], *MARKS[1 + padding :], *WORDS, *letters, ",", *map(str, range(10))]
    vocabulary = {token: number for number, token in enumerate(known)}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(mark, vocabulary[mark]) for mark in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save(path: Path, family: str = "bert", kind: Any = transformers.AutoModel, **modules: str) -> Path:
    """A model and its tokenizer; with ``modules``, by name, a folder as sentence-transformers writes it.

    Args:
        path: Where.
        family: Of ``FAMILIES``.
        kind: transformers class that builds it.
        modules: Such as pooling="mean_tokens"; others are named and have nothing.
    """
    make, padding = FAMILIES[family]
    words = tokenizer(padding)
    torch.manual_seed(0)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4} if family == "distilbert" else SIZES
    config = make(vocab_size=len(words), max_position_embeddings=POSITIONS, pad_token_id=padding, **sizes)
    kind.from_config(config).save_pretrained(path)
    words.save_pretrained(path)
    if modules:
        kinds = ["Transformer", *(name.capitalize() for name in modules)]
        places = [f"{number}_{name}" if number else "" for number, name in enumerate(kinds)]
        listed = [
            {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{name}"}
            for number, (name, place) in enumerate(zip(kinds, places, strict=True))
        ]
        (path / "modules.json").write_text(json.dumps(listed))
        if "pooling" in modules:
            (path / "1_Pooling").mkdir()
            chosen = {
                f"pooling_mode_{name}": name in modules["pooling"]
                for name in ("cls_token", "mean_tokens", "max_tokens")
            }
            (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **chosen}))
    return path
