"""The base model as a source of canaries: which tokens are text, and what it expects.

Comes in: a recipe and its tokenizer; the model is loaded when it is first asked. Goes out: token ids and
log-probabilities. Must never see data: the weights are the base model's, and rows are made of carriers and secrets alone.

Shape suffixes: B rows of a batch, one of them, T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.canaries import kinds
from dpllm.canaries.canaries import Canary, encode_secret
from dpllm.errors import ConfigError
from dpllm.model import loading
from dpllm.recipe.config import RunConfig

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MARKS_OF_A_SPACE = ("\u0120", "\u2581", " ")
"""With which a token begins that stands behind a space, in byte-level and in SentencePiece vocabularies."""


class ModelSource:
    """A recipe's base model and its tokenizer, as far as kinds need them. No method sees training data."""

    def __init__(self, config: RunConfig, tokenizer: Any, device: torch.device) -> None:
        """Loads nothing yet; data.format of ``config`` is resolved."""
        self._config, self._tokenizer, self._device = config, tokenizer, device

    @cached_property
    def ordinary_ids(self) -> list[int]:
        """Tokens that are printable text by themselves, none of them special or added, rising."""
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        pieces = self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))
        # The bytes of a SentencePiece vocabulary spell characters that have tokens of their own.
        ids = [
            token for token, piece in enumerate(pieces) if piece and token not in special and not _BYTE.fullmatch(piece)
        ]
        texts = self._tokenizer.batch_decode([[token] for token in ids])
        pairs = zip(ids, texts, strict=True)
        return [token for token, text in pairs if text.strip() and text.isprintable() and "\ufffd" not in text]

    @cached_property
    def first_ids(self) -> list[int]:
        """Ordinary tokens with which a secret can begin: behind a space, where the format or the template puts one."""
        pieces = self._tokenizer.convert_ids_to_tokens(self.ordinary_ids)
        pairs = zip(self.ordinary_ids, pieces, strict=True)
        return [token for token, piece in pairs if piece.startswith(_MARKS_OF_A_SPACE) == self._spaced]

    def text(self, ids: Sequence[int]) -> str:
        """The secret that these tokens spell, without the space before it."""
        return str(self._tokenizer.decode(list(ids))).removeprefix(" ")

    def reads(self, carrier: str, secret: str, ids: Sequence[int]) -> bool:
        """Whether a training row of carrier and secret is encoded with exactly these tokens for the secret."""
        # The bare text first: most of what fails fails there, and it is quick.
        bare = self._tokenizer(f" {secret}" if self._spaced else secret, add_special_tokens=False)["input_ids"]
        if list(bare[-len(ids) :]) != list(ids):
            return False
        row, start, end = self._encode(carrier, secret) or ((), 0, 0)
        return row[start:end] == tuple(ids)

    def check_room(self, sentences: Sequence[str], num_tokens: int) -> None:
        """Raises ConfigError where data.max_length has no room for so many tokens behind some of the sentences."""
        for sentence in sentences:
            prompt, after = self._prompt(sentence)
            if len(prompt) + num_tokens + after > self._config.data.max_length:
                raise self._too_long()

    def expected(self, sentences: Sequence[str]) -> NDArray[np.float64]:
        """Mean over the sentences of the base model's log-probability of each token behind them, shape (V,), in nats."""
        total_V: Any = 0.0
        for sentence in sentences:
            ids_BT = torch.tensor([self._prompt(sentence)[0]], device=self._device)
            with torch.inference_mode():
                logits_V = self._model(input_ids=ids_BT, use_cache=False).logits[0, -1].double().cpu()
            if bool(logits_V.isnan().any()):
                raise ConfigError(
                    f"{self._config.model.name_or_path}: the base model's predictions are not finite, so no canary can be drawn "
                    "from it; use audit.canaries.kind digits, or model.dtype: float32."
                )
            total_V = total_V + torch.log_softmax(logits_V, dim=-1)
        return np.asarray((total_V / len(sentences)).numpy(), dtype=np.float64)

    @property
    def _spaced(self) -> bool:
        data = self._config.data
        return data.format != "messages" and (data.template is None or data.template.endswith(" {completion}"))

    @cached_property
    def _model(self) -> Any:
        return loading.load_base(self._config.model, self._device).eval()

    @cached_property
    def _a_secret(self) -> str:
        """One token that is read back behind a carrier, to see where secrets begin."""
        sentence = kinds.carrier(0)
        for token in self.first_ids:
            if self.reads(sentence, self.text((token,)), (token,)):
                return self.text((token,))
        raise ConfigError(
            f"{self._config.model.name_or_path}: its tokenizer merges or splits every token after a carrier, so secrets would "
            "not be read back as drawn; use audit.canaries.kind digits."
        )

    def _encode(self, carrier: str, secret: str) -> tuple[tuple[int, ...], int, int] | None:
        """A row as training reads it, and where its secret begins and ends; None where training would lose some of it."""
        data = self._config.data
        assert data.format != "auto"
        how = (data.format, self._tokenizer, data)
        try:
            sequence, mask = encode_secret(Canary("c00000", 1, carrier, secret, inserted=True), *how)
        except ConfigError:
            # Where not even this is learned, the error says why.
            encode_secret(Canary("c00000", 1, kinds.carrier(0), "0", inserted=True), *how)
            return None
        start, end = mask.index(True), len(mask) - mask[::-1].index(True)
        if carrier not in self._tokenizer.decode(list(sequence.input_ids[:start])):
            return None  # the row was cut, and the like of the secret stands in the carrier
        return sequence.input_ids, start, end

    def _prompt(self, sentence: str) -> tuple[tuple[int, ...], int]:
        """The tokens that stand before a secret, among them those of a chat template, and how many come after it."""
        sequence, start, end = self._encode(sentence, self._a_secret) or ((), 0, 0)
        if not start:
            raise self._too_long()
        return tuple(sequence[:start]), len(sequence) - end

    def _too_long(self) -> ConfigError:
        return ConfigError(
            f"data.max_length {self._config.data.max_length} is too short for some canaries, so their secrets would be cut off; "
            "raise data.max_length, or lower audit.canaries.tokens."
        )
