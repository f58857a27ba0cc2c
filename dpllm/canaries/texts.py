"""One canary: its text, its training row, the tokens of that row, and which secrets survive a tokenizer unchanged.

Comes in: carriers and secrets, a recipe and its tokenizer; the base model is loaded only when its predictions are needed. Goes
out: rows, tokens, masks of secrets, log-probabilities. Must not see data, and imports torch only with the model.

Shape suffixes: B rows of a batch (always 1), T tokens, V vocabulary.
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
"""The public completion of a row whose secret stands in the prompt."""
REJECTED = "-"
"""Ends the id of a pair's rejected answer, where each answer is a canary of its own."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MARKS_OF_A_SPACE = ("\u0120", "\u2581", " ")
"""How a token that follows a space begins, in byte-level and in SentencePiece vocabularies."""

# A carrier is one choice from each column; no word contains a digit, so a secret occurs in only one place.
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
"""Number of distinct carriers."""


def carrier(index: int) -> str:
    """The carrier with this index, 0 to NUM_CARRIERS - 1; distinct indices give distinct sentences."""
    words = []
    for column in COLUMNS:
        index, choice = divmod(index, len(column))
        words.append(column[choice])
    item, kind, side, place, head, tail, verb = words
    return f"The {item} {kind} for the {side} {place} of {head}{tail} {verb}"


@dataclass(frozen=True)
class Canary:
    """One random secret after a carrier sentence that no other canary shares."""

    canary_id: str
    """Position in the plan; says nothing about the coin."""
    group: int
    """How many times it is repeated if its coin says in; 0 for a reference."""
    carrier: str = field(repr=False)
    """The sentence before the secret."""
    secret: str = field(repr=False)
    """The text that an audit looks for: digits, the text of some tokens, or a personal detail, depending on the kind."""
    inserted: bool
    """The coin."""
    rejected: str = field(default="", repr=False)
    """For a preference pair: a second secret, drawn like the first, which is preferred. Empty: not a pair."""
    flipped: bool = field(default=False, repr=False)
    """If the coin is a label: whether it was flipped before training, by the mechanism that flips all labels. Drawn once."""
    completion: str = ""
    """The training target after a secret that stands in the prompt. Empty: the secret itself is the target."""

    @property
    def text(self) -> str:
        """Carrier and secrets as one text; a canary of a foreign manifest may have no carrier."""
        return f"{self.carrier} {self.secret} {self.rejected}".strip()

    @property
    def answers(self) -> tuple[Canary, ...]:
        """The canary itself; for a pair, each answer as a canary of its own."""
        if not self.rejected:
            return (self,)
        second = replace(self, canary_id=self.canary_id + REJECTED, secret=self.rejected, rejected="")
        return replace(self, rejected=""), second

    def example(self, fmt: Format) -> dict[str, Any]:
        """The training row of this canary.

        Raises:
            ConfigError: The secret stands in the prompt, but rows of this format have no prompt or are pairs.
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
    """Raises ConfigError for secrets in prompts if rows of this format have no prompt with one completion."""
    if place == "prompt" and fmt in ("text", "preference"):
        raise ConfigError(
            f"audit.canaries.place: prompt, but rows of format {fmt} have no prompt with one completion. Set "
            "audit.canaries.place: target, or data.format if the rows have another."
        )


def encode_secret(
    canary: Canary, fmt: Format, tokenizer: Any, data: DataConfig
) -> tuple[TokenSequence, tuple[bool, ...]]:
    """Encodes a canary (for a pair, its chosen answer) as training does, and finds the tokens of its secret.

    They are the shortest run of tokens, as far to the right as possible, whose decoding contains the secret. If the secret
    stands in the prompt, they replace the targets of training in the sequence, so that the score measures how the model
    completes the beginning of a prompt.

    Returns:
        The sequence, and a mask over its tokens.

    Raises:
        ConfigError: The canary does not fit into max_length, or its secret is not a training target.
    """
    from dpllm.text.tokens import encode  # imported here, because cards do not need it

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
    """Start and end (exclusive) of the secret's tokens; a chat template may add tokens after it."""
    for start in range(len(ids) - 1, -1, -1):
        if secret in tokenizer.decode(ids[start:]):
            end = next(end for end in range(start + 1, len(ids) + 1) if secret in tokenizer.decode(ids[start:end]))
            return start, end
    return None


class ModelSource:
    """The parts of a recipe's base model and tokenizer that kinds of canaries need. No method sees training data."""

    def __init__(self, config: RunConfig, tokenizer: Any, device: torch.device) -> None:
        """Loads nothing yet; data.format of ``config`` must not be auto."""
        self._config, self._tokenizer, self._device = config, tokenizer, device

    @cached_property
    def ordinary_ids(self) -> list[int]:
        """Ids of tokens that are printable text by themselves and neither special nor added, in rising order."""
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        pieces = self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))
        # Byte tokens of a SentencePiece vocabulary are excluded: they spell characters that have tokens of their own.
        ids = [
            token for token, piece in enumerate(pieces) if piece and token not in special and not _BYTE.fullmatch(piece)
        ]
        texts = self._tokenizer.batch_decode([[token] for token in ids])
        pairs = zip(ids, texts, strict=True)
        return [token for token, text in pairs if text.strip() and text.isprintable() and "\ufffd" not in text]

    @cached_property
    def first_ids(self) -> list[int]:
        """Ordinary tokens that can begin a secret: with a leading space if the format or template puts one, else without."""
        pieces = self._tokenizer.convert_ids_to_tokens(self.ordinary_ids)
        pairs = zip(self.ordinary_ids, pieces, strict=True)
        return [token for token, piece in pairs if piece.startswith(_MARKS_OF_A_SPACE) == self._spaced]

    def text(self, ids: Sequence[int]) -> str:
        """The secret that these tokens spell, without the space before it."""
        return str(self._tokenizer.decode(list(ids))).removeprefix(" ")

    def reads(self, carrier: str, secret: str, ids: Sequence[int]) -> bool:
        """Whether a training row of carrier and secret is encoded with exactly these tokens for the secret."""
        # The bare text first: this check is fast, and most failures show here.
        bare = self._tokenizer(f" {secret}" if self._spaced else secret, add_special_tokens=False)["input_ids"]
        if list(bare[-len(ids) :]) != list(ids):
            return False
        row, start, end = self._encode(carrier, secret) or ((), 0, 0)
        return row[start:end] == tuple(ids)

    def check_room(self, sentences: Sequence[str], num_tokens: int) -> None:
        """Raises ConfigError if data.max_length has no room for ``num_tokens`` tokens after one of the sentences."""
        for sentence in sentences:
            prompt, after = self._prompt(sentence)
            if len(prompt) + num_tokens + after > self._config.data.max_length:
                raise self._too_long()

    def expected(self, sentences: Sequence[str]) -> NDArray[np.float64]:
        """The base model's log-probability of each next token, averaged over the sentences: shape (V,), in nats."""
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
        """The text of one token that survives encoding after a carrier, used to find where secrets begin."""
        sentence = carrier(0)
        for token in self.first_ids:
            if self.reads(sentence, self.text((token,)), (token,)):
                return self.text((token,))
        raise ConfigError(
            f"{self._config.model.name_or_path}: its tokenizer merges or splits every token after a carrier, so secrets would "
            "not be read back as drawn; use audit.canaries.kind digits."
        )

    def _encode(self, sentence: str, secret: str) -> tuple[tuple[int, ...], int, int] | None:
        """A row as training reads it, with the start and end of its secret; None if training would cut the row."""
        data = self._config.data
        assert data.format != "auto"
        encoding = (data.format, self._tokenizer, data)
        try:
            sequence, mask = encode_secret(Canary("c00000", 1, sentence, secret, inserted=True), *encoding)
        except ConfigError:
            # If even the simplest canary cannot be trained on, this raises the error that says why.
            encode_secret(Canary("c00000", 1, carrier(0), "0", inserted=True), *encoding)
            return None
        start, end = mask.index(True), len(mask) - mask[::-1].index(True)
        if sentence not in self._tokenizer.decode(list(sequence.input_ids[:start])):
            return None  # the row was cut, and the match for the secret is inside the carrier
        return sequence.input_ids, start, end

    def _prompt(self, sentence: str) -> tuple[tuple[int, ...], int]:
        """The tokens before a secret, including those of a chat template, and the number of tokens after it."""
        sequence, start, end = self._encode(sentence, self._a_secret) or ((), 0, 0)
        if not start:
            raise self._too_long()
        return tuple(sequence[:start]), len(sequence) - end

    def _too_long(self) -> ConfigError:
        return ConfigError(
            f"data.max_length {self._config.data.max_length} is too short for some canaries, so their secrets would be cut off; "
            "raise data.max_length, or lower audit.canaries.tokens."
        )
