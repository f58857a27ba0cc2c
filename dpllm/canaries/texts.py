"""One canary: what it says, the row that it makes, that row as tokens, and which secrets a tokenizer reads back.

Comes in: carriers and secrets, a recipe and its tokenizer; the base model is loaded when it is first asked what it expects. Goes
out: rows, tokens, masks of secrets, log-probabilities. Must never see data, and imports torch only with the model.

Shape suffixes: B rows of a batch, one of them, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError, DataError
from dpllm.privacy.schedule import TokenSequence
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.text.layouts import Format

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

COMPLETION = "Thank you, noted."
"""What a row learns whose secret stands in the prompt; public."""
REJECTED = "-"
"""Ends the name of a pair's rejected answer, where answers are canaries of their own."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MARKS_OF_A_SPACE = ("\u0120", "\u2581", " ")
"""With which a token begins that stands behind a space, in byte-level and in SentencePiece vocabularies."""

# A carrier is one choice from each column; no word holds a digit, so a secret is found in one place only.
_OBJECTS = (
    *("locker", "gate", "archive", "alarm", "voucher", "freezer", "cabinet", "parking", "courier", "pantry"),
    *("studio", "garage", "cellar", "workshop", "elevator", "boathouse", "vault", "mailbox", "pharmacy", "annex"),
)
_KINDS = ("code", "number", "key", "passcode", "entry", "combination", "reference", "sequence")
_SIDES = (
    *("north", "south", "east", "west", "upper", "lower", "old", "new", "inner", "outer"),
    *("left", "right", "central", "rear", "riverside", "harbour"),
)
_PLACES = (
    *("store", "clinic", "library", "depot", "office", "school", "bakery", "station", "museum", "hotel"),
    *("nursery", "brewery", "chapel", "theatre", "foundry", "orchard", "dairy", "market", "printworks", "observatory"),
)
_NAME_HEADS = (
    *("Halv", "Bren", "Corr", "Dall", "Ester", "Farn", "Gren", "Hjort", "Ingel", "Jarv"),
    *("Kest", "Lund", "Marl", "Norr", "Oster", "Pell", "Quill", "Roth", "Sand", "Tarn"),
    *("Ulv", "Vest", "Wick", "Yarr", "Zell"),
)
_NAME_TAILS = (
    *("orsen", "ano", "berg", "croft", "dale", "ek", "field", "gard", "holm", "ington"),
    *("jord", "kowski", "ley", "mann", "nova", "oux", "quist", "rup", "stad", "well"),
)
_VERBS = ("is", "was set to", "reads", "remains")
COLUMNS = (_OBJECTS, _KINDS, _SIDES, _PLACES, _NAME_HEADS, _NAME_TAILS, _VERBS)
NUM_CARRIERS = math.prod(map(len, COLUMNS))
"""How many sentences there are."""


def carrier(index: int) -> str:
    """The index-th sentence of the grammar, of NUM_CARRIERS; distinct indices give distinct sentences."""
    words = []
    for column in COLUMNS:
        index, choice = divmod(index, len(column))
        words.append(column[choice])
    item, kind, side, place, head, tail, verb = words
    return f"The {item} {kind} for the {side} {place} of {head}{tail} {verb}"


@dataclass(frozen=True)
class Canary:
    """One random secret behind a sentence that no other canary shares."""

    canary_id: str
    """Position in the plan; says nothing about the coin."""
    group: int
    """How many times it is repeated where its coin says in; 0 for a reference."""
    carrier: str = field(repr=False)
    """The sentence before the secret."""
    secret: str = field(repr=False)
    """What is to be found: digits, the text of some tokens, or a personal detail, as the kind says."""
    inserted: bool
    """The coin."""
    rejected: str = field(default="", repr=False)
    """Of a preference pair: another secret, drawn as the first was. The first is preferred. Empty: this is no pair."""
    flipped: bool = field(default=False, repr=False)
    """Where the coin is a label: whether it was flipped before training, as all labels are. Drawn once."""
    completion: str = ""
    """What is learned behind the secret, which then stands in the prompt. Empty: the secret is learned."""

    @property
    def text(self) -> str:
        """Carrier and secrets as one text; a stranger's canary may have no carrier."""
        return f"{self.carrier} {self.secret} {self.rejected}".strip()

    @property
    def answers(self) -> tuple[Canary, ...]:
        """Itself; of a pair, each answer as a canary of its own."""
        if not self.rejected:
            return (self,)
        second = replace(self, canary_id=self.canary_id + REJECTED, secret=self.rejected, rejected="")
        return replace(self, rejected=""), second

    def example(self, fmt: Format) -> dict[str, Any]:
        """The training row of this canary.

        Raises:
            ConfigError: The secret stands in the prompt, and rows of this format have none or are pairs.
        """
        if self.completion:
            check_place("prompt", fmt)
        text, prompt, completion = f"{self.carrier} {self.secret}", self.carrier, self.secret
        if self.completion:
            prompt, completion = text, self.completion
        first, second = (self.secret, self.rejected)[:: 1 if self.inserted != self.flipped else -1]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        rows: dict[Format, dict[str, Any]] = {
            "text": {"text": text},
            "prompt_completion": {"prompt": prompt, "completion": completion},
            "messages": {"messages": turns},
            "preference": {"prompt": self.carrier, "chosen": first, "rejected": second},
        }
        return rows[fmt]


def check_place(place: str, fmt: str) -> None:
    """Refuses secrets in prompts, with a ConfigError, where rows have no prompt with one completion."""
    if place == "prompt" and fmt in ("text", "preference"):
        raise ConfigError(
            f"audit.canaries.place: prompt, but rows of format {fmt} have no prompt with one completion. Set "
            "audit.canaries.place: target, or data.format if the rows have another."
        )


def encode_secret(
    canary: Canary, fmt: Format, tokenizer: Any, data: DataConfig
) -> tuple[TokenSequence, tuple[bool, ...]]:
    """Encodes a canary as training does, of a pair the chosen answer, and finds the tokens of its secret.

    They are the shortest run of tokens, as far to the right as possible, whose decoding contains the secret. Where the secret
    stands in the prompt, they are the targets of the sequence instead of those that training has: what is scored is how the model
    completes the beginning of a prompt.

    Returns:
        The sequence, and a mask over its tokens.

    Raises:
        ConfigError: The canary does not fit into max_length, or its secret is not a training target.
    """
    from dpllm.text.tokens import encode  # which a card need not load

    fmt = "prompt_completion" if fmt == "preference" else fmt
    try:
        sequences = encode(canary.example(fmt), fmt, tokenizer, data)
    except DataError as error:
        raise ConfigError(f"canary {canary.canary_id} cannot be encoded: {error}") from None
    span = _find(canary.secret, sequences[0].input_ids, tokenizer) if len(sequences) == 1 else None
    if span is None:
        raise ConfigError(
            f"canary {canary.canary_id} does not fit into data.max_length ({data.max_length} tokens), so its secret would "
            "not be trained on as a whole; raise data.max_length, or lower audit.canaries.digits or audit.canaries.tokens."
        )
    sequence = sequences[0]
    mask = tuple(span[0] <= index < span[1] for index in range(len(sequence.input_ids)))
    learned = sequence.loss_mask[span[0] : span[1]]
    if canary.completion:
        if any(learned):
            raise ConfigError(
                f"canary {canary.canary_id}: its secret is a training target though it stands in the prompt, so the audit would "
                "not measure what prompts give away. Set audit.canaries.place: target."
            )
        return replace(sequence, loss_mask=mask, denominator=sum(mask)), mask
    if not all(learned):
        raise ConfigError(
            f"canary {canary.canary_id}: its secret is not a training target in format {fmt}, so the model would not learn it; "
            "set data.format to text or prompt_completion."
        )
    return sequence, mask


def _find(secret: str, ids: Sequence[int], tokenizer: Any) -> tuple[int, int] | None:
    """First and last-plus-one token of the secret; a chat template may put tokens of its own behind it."""
    for start in range(len(ids) - 1, -1, -1):
        if secret in tokenizer.decode(ids[start:]):
            end = next(end for end in range(start + 1, len(ids) + 1) if secret in tokenizer.decode(ids[start:end]))
            return start, end
    return None


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
        import torch

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
        mean_V: NDArray[np.float64] = (total_V / len(sentences)).numpy()
        return mean_V

    @property
    def _spaced(self) -> bool:
        data = self._config.data
        return data.format != "messages" and (data.template is None or data.template.endswith(" {completion}"))

    @cached_property
    def _model(self) -> Any:
        from dpllm.model import loading

        return loading.load_base(self._config.model, self._device).eval()

    @cached_property
    def _a_secret(self) -> str:
        """One token that is read back behind a carrier, which shows where secrets begin."""
        sentence = carrier(0)
        for token in self.first_ids:
            if self.reads(sentence, self.text((token,)), (token,)):
                return self.text((token,))
        raise ConfigError(
            f"{self._config.model.name_or_path}: its tokenizer merges or splits every token after a carrier, so secrets would "
            "not be read back as drawn; use audit.canaries.kind digits."
        )

    def _encode(self, sentence: str, secret: str) -> tuple[tuple[int, ...], int, int] | None:
        """A row as training reads it, with the start and end of its secret; None where training would cut some of it."""
        data = self._config.data
        assert data.format != "auto"
        encoding = (data.format, self._tokenizer, data)
        try:
            sequence, mask = encode_secret(Canary("c00000", 1, sentence, secret, inserted=True), *encoding)
        except ConfigError:
            # Where not even this is learned, the error says why.
            encode_secret(Canary("c00000", 1, carrier(0), "0", inserted=True), *encoding)
            return None
        start, end = mask.index(True), len(mask) - mask[::-1].index(True)
        if sentence not in self._tokenizer.decode(list(sequence.input_ids[:start])):
            return None  # the row was cut, and the like of the secret stands in the carrier
        return sequence.input_ids, start, end

    def _prompt(self, sentence: str) -> tuple[tuple[int, ...], int]:
        """The tokens before a secret, those of a chat template included, and the number of tokens after it."""
        sequence, start, end = self._encode(sentence, self._a_secret) or ((), 0, 0)
        if not start:
            raise self._too_long()
        return tuple(sequence[:start]), len(sequence) - end

    def _too_long(self) -> ConfigError:
        return ConfigError(
            f"data.max_length {self._config.data.max_length} is too short for some canaries, so their secrets would be cut off; "
            "raise data.max_length, or lower audit.canaries.tokens."
        )
