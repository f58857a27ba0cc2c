"""Several rows at a time: the logits or states that a model reads of them, and the texts that it writes behind them.

Comes in: a model, rows of token ids or texts. Goes out: the logits behind rows that go on alike, token by token; the mean of a
text's last hidden states; or what is written behind each prompt. Must not know whose rows they are.

What is written follows from the prompt and the arguments alone: defaults that a model brings with it (penalties, end tokens,
temperatures) are put aside. In what is read no row's bits follow its company. Every forward pass of a ``Reader`` has a shape that
follows public numbers alone: rows are padded on the left to one width, and read in physical batches of one height, filled up with
a row that is given. The mask is always passed, and is never all ones: transformers leaves out one that is, and takes another
kernel. ``lower_in_company`` shows on synthetic rows that what is read of a row has the same bits in any company and at any place,
as it is read first and when it has grown as long as it can; where it has not, or where the longest row decides anything
(``evaluate.rows_at_once``), the height is 1.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig

from dpllm.errors import Refused
from dpllm.model.evaluate import contiguous_head, rows_at_once
from dpllm.model.loading import Pooling
from dpllm.privacy.embedded import unit_length
from dpllm.privacy.selfcheck import has_experts

MOST_TOKENS = 4096  # of a physical batch, padding included
STEPS = 3  # tokens that synthetic rows go on for
_TOKENS_PER_BATCH = (
    2**13
)  # that are written, padding and beams included; what they cost is the cache of keys and values
Rows = Sequence[Sequence[int]]
Tokens = tuple[int, ...]
# A legend of shapes: R rows, H rows of a physical batch, W width, V vocabulary, D hidden units; B rows of a batch, T tokens of
# the longest prompt, G tokens of prompt and completion.


class Reader:
    """Reads rows of at most ``width`` tokens, and then the same tokens behind all of them."""

    def __init__(
        self,
        model: Any,
        width: int,
        filler: Sequence[int],
        rows: int,
        *,
        states: Pooling | Literal["causal"] | None = None,
        further: int = STEPS,
    ) -> None:
        """Takes a model in eval mode, a row that fills physical batches up, and how many rows there usually are.

        Behind them ``further`` tokens are read, at most.

        With ``states``, in place of logits the mean in float64 of a row's last hidden states is read, and nothing is kept to go
        on with: of all tokens or the first alone; of a causal model all but the first, which takes most of the attention and says
        little, so that a row of one token has none. Rows of an encoder stand on the left, where it counts places from.

        Raises:
            Refused: The model keeps no cache of keys and values, or takes no mask or positions.
        """
        known = inspect.signature(model.forward).parameters
        self._left = states not in (None, "causal")
        needed = {"attention_mask"} if self._left else {"attention_mask", "position_ids", "past_key_values"}
        if missing := needed - known.keys():
            raise Refused(
                f"{type(model).__name__} takes no {', '.join(sorted(missing))}, so that padded rows cannot be read together. Use "
                "a transformer with a cache of keys and values."
            )
        self._model, self._filler, self._states = model, list(filler), states
        self._width = width + 1  # so that no mask is all ones
        self._further = 0 if states else further
        self._device = next(model.parameters()).device
        # RoBERTa counts its places by tokens that are no padding.
        self._padding = (getattr(model.config, "pad_token_id", None) or 0) if self._left else 0
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._state: list[tuple[Any, Tensor]] = []
        self.height = max(1, min(rows, MOST_TOKENS // self._width))
        contiguous_head(model)

    def read(self, rows: Rows, longer: int = 0) -> NDArray[Any]:
        """The logits behind each row, shape (R, V); or their mean states, shape (R, D). Rows may have ``longer`` more tokens."""
        found, self._state, total = [], [], self._width + longer
        for start in range(0, len(rows), self.height):
            part = [*rows[start : start + self.height]]
            part += [self._filler] * (self.height - len(part))
            ids_HW = torch.full((self.height, total), self._padding, dtype=torch.long)
            mask_HW = torch.zeros_like(ids_HW)
            for place, row in enumerate(part):
                first = 0 if self._left else total - len(row)
                ids_HW[place, first : first + len(row)] = torch.tensor(row)
                mask_HW[place, first : first + len(row)] = 1
            found.append(self._pass(ids_HW, mask_HW, None))
        return np.concatenate(found)[: len(rows)]

    def go_on(self, token: int, rows: int) -> NDArray[np.float32]:
        """The logits of so many rows behind one more token."""
        state, self._state, found = self._state, [], []
        for cache, mask_HW in state:
            longer_HW = torch.cat((mask_HW, torch.ones(self.height, 1, dtype=torch.long)), dim=1)
            found.append(self._pass(torch.full((self.height, 1), token), longer_HW, cache))
        return np.concatenate(found)[:rows]

    @torch.inference_mode()
    def _pass(self, ids: Tensor, mask_HW: Tensor, cache: Any) -> NDArray[Any]:
        places = (mask_HW.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": mask_HW, "position_ids": places}
        moved = {name: value.to(self._device) for name, value in given.items()}
        if self._states:
            if self._left:
                del moved["position_ids"]
            out = self._model.base_model(**moved, **({} if self._left else {"use_cache": False}))
            kept_HW = {"causal": places > 0, "mean": mask_HW > 0, "cls": (places == 0) & (mask_HW > 0)}[self._states]
            kept_HW1 = kept_HW.to(self._device).unsqueeze(2)
            states_HWD = out.last_hidden_state.double().masked_fill(~kept_HW1, 0.0)
            mean_HD: NDArray[np.float64] = (states_HWD.sum(dim=1) / kept_HW1.sum(dim=1)).cpu().numpy()
            return mean_HD
        out = self._model(**moved, past_key_values=cache, use_cache=True, **self._only_last)
        self._state.append((out.past_key_values, mask_HW))
        logits_HV: NDArray[np.float32] = out.logits[:, -1].float().cpu().numpy()
        return logits_HV

    def lower_in_company(self, vocabulary: int) -> bool:
        """Lowers the height to 1 where a row's bits follow its company or its place; whether it did. Rows are synthetic."""
        before = self.height
        # The rounding of experts follows routing, which no few rows can show.
        if has_experts(self._model) or rows_at_once(self._model, 2, self._width + self._further, windows=True) < 2:
            self.height = 1
        if self.height > 1 and self._differs(vocabulary):
            self.height = 1
        return self.height < before

    def _differs(self, vocabulary: int) -> bool:
        """Whether a row has other bits in other company: short ones beside the longest too, which may decide about them."""
        steps, last = min(STEPS, self._further), self.height - 1
        ends = 0 if self._further <= steps else self._further - steps
        beside = ([0], [last], range(self.height))  # others, and itself at every place
        near = [(length, 0, beside) for length in sorted({self._width // 2, min(2, self._width - 1)})]
        # At the end of the last text, where the longest has all its tokens, and the short one those of the steps alone.
        far = [(min(2, self._width - 1), ends, beside[1:])] if ends else []
        return any(self._bits(vocabulary, *case, steps) > 1 for case in (*near, *far))

    def _bits(self, vocabulary: int, length: int, longer: int, beside: Sequence[Sequence[int]], steps: int) -> int:
        """How many different bits are read of a row of this length in different company."""
        draw, seen, longest = np.random.default_rng(0), set[tuple[bytes, ...]](), self._width - 1 + longer
        one = draw.integers(0, vocabulary, length).tolist()
        for places in beside:
            lengths = draw.integers(1, longest + 1, self.height)
            lengths[0 if places[0] else -1] = longest
            rows = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
            rows[::2] = [row[:1] * len(row) for row in rows[::2]]  # one token again and again
            for place in places:
                rows[place] = one
            logits = [self.read(rows, longer), *(self.go_on(7 + step, self.height) for step in range(steps))]
            seen |= {tuple(part[place].tobytes() for part in logits) for place in places}
        return len(seen)


class Embedder:
    """One vector of length 1 for each text: the mean of its last hidden states, or a sentence encoder's pooling of them.

    Guarantee:
        A text's vector has the same bits whatever the other texts. What has no text, or no finite mean, has zeros.
    """

    def __init__(self, model: Any, tokenizer: Any, width: int, pooling: Pooling | None = None) -> None:
        """Takes a model in eval mode, its tokenizer, of how many tokens a text is read, and a sentence encoder's pooling.

        Raises:
            Refused: See ``Reader``.
        """
        first = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        start = [next(token for token in first if token is not None)]
        before, after = self._around = _template(tokenizer) if pooling else (start, [])
        self._tokenizer, self._width = tokenizer, width
        self._reader = Reader(
            model, width + len(before + after), [*before, *after] or [0], MOST_TOKENS, states=pooling or "causal"
        )
        self._reader.lower_in_company(len(tokenizer))
        self.height: int = self._reader.height

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Of one text or more, shape (R, D)."""
        ids = self._tokenizer([text.strip() for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
        before, after = self._around
        found_RD = self._reader.read([[*before, *one[: self._width], *after] for one in ids])
        return unit_length(found_RD * np.array([[bool(one)] for one in ids]))


def _template(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind each text, which is what it puts around one token."""
    bare, whole = ([*tokenizer("a", add_special_tokens=more, verbose=False)["input_ids"]] for more in (False, True))
    if not bare:
        raise Refused(
            "the encoder's tokenizer reads nothing in the letter a, so texts cannot be put in place. Use another."
        )
    start = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def generation_config(
    tokenizer: Any,
    num_tokens: int,
    ends: Collection[int],
    *,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """How a text is written.

    Args:
        tokenizer: Names the padding, which stands behind an end token.
        num_tokens: For each prompt, at most, >= 1.
        ends: Tokens that end a text; of none a text has all its tokens.
        beams: More than 1: beam search, of which the likeliest beam is taken, by log p for each token.
        temperature: 0: the likeliest token each time.
        top_p: Only the likeliest tokens that together have this probability, in (0, 1].
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    chance = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=num_tokens,
        pad_token_id=padding,
        eos_token_id=sorted(ends) or None,
        num_beams=beams,
        **(chance if temperature > 0 else {"do_sample": False}),
    )


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text: the model's own, of which a chat model may have several, and the tokenizer's."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    own = inner.generation_config.eos_token_id
    return {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}


def until_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """The tokens before the first end token: what a reader takes for the text."""
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def write_behind(model: nn.Module, config: GenerationConfig, prompts_ids: Sequence[Sequence[int]]) -> list[Tokens]:
    """What a model writes behind every prompt, many at a time: the same as one at a time, but for rounding.

    Args:
        model: A causal language model of transformers, with or without a PEFT adapter, in eval mode.
        config: Of ``generation_config``.
        prompts_ids: At least one token each.
    """
    device = next(model.parameters()).device
    beams, num_tokens = int(config.num_beams), int(config.max_new_tokens)
    result: list[Tokens] = [()] * len(prompts_ids)
    # Longest first: rows of like length need little padding, and too large a batch fails at once.
    order = sorted(range(len(prompts_ids)), key=lambda index: (-len(prompts_ids[index]), index))
    with torch.inference_mode(), _plain(model) as inner, contiguous_head(inner):
        while order:
            width = len(prompts_ids[order[0]])
            size = max(1, _TOKENS_PER_BATCH // (beams * (width + num_tokens)))
            size = rows_at_once(inner, size, width + num_tokens)
            rows, order = order[:size], order[size:]
            ids_BT = torch.full((len(rows), width), int(config.pad_token_id), dtype=torch.long)
            real_BT = torch.zeros_like(ids_BT)
            for place, row in enumerate(rows):
                prompt = torch.tensor(tuple(prompts_ids[row]), dtype=torch.long)
                ids_BT[place, width - len(prompt) :] = prompt
                real_BT[place, width - len(prompt) :] = 1
            inputs = {"input_ids": ids_BT.to(device), "attention_mask": real_BT.to(device)}
            written_BG = inner.generate(**inputs, generation_config=config)
            for row, written in zip(rows, written_BG[:, width:].tolist(), strict=True):
                result[row] = tuple(written)
    return result


@contextlib.contextmanager
def _plain(model: Any) -> Iterator[Any]:
    """The model that generates, without the defaults that it brings; transformers puts them where a value is unset."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    own = inner.generation_config
    inner.generation_config = GenerationConfig()
    try:
        yield inner
    finally:
        inner.generation_config = own
