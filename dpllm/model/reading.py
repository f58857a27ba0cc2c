"""Reads several rows at a time for their logits or hidden states, and generates texts for several prompts at a time.

Comes in: a model, rows of token ids or texts. Goes out: next-token logits of rows that all continue with the same tokens; the
mean of a text's last hidden states; or the completion of each prompt. Must not know whose rows they are.

Completions depend on the prompt and the arguments alone: a model's own defaults (penalties, end tokens, temperatures) are
ignored. Logits and states are batch-invariant: a row's bits do not depend on the other rows. Every forward pass of a ``Reader``
has a shape that depends on public numbers alone: rows are padded on the left to one width and read in physical batches of one
height, filled up with a given row. The mask is always passed and never all ones: transformers drops such a mask and takes another
kernel. ``lower_in_company`` tests on synthetic rows that a row's bits are the same with any other rows and at any position, both
when it is first read and when it has its maximum length; if they are not, or if the longest row changes how others are read
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
STEPS = 3  # tokens by which synthetic rows are continued
_TOKENS_PER_BATCH = (
    2**13
)  # that are written, padding and beams included; what they cost is the cache of keys and values
Rows = Sequence[Sequence[int]]
Tokens = tuple[int, ...]
# A legend of shapes: R rows, H rows of a physical batch, W width, V vocabulary, D hidden units; B rows of a batch, T tokens of
# the longest prompt, G tokens of prompt and completion.


class Reader:
    """Reads rows of at most ``width`` tokens, and then continues all of them with the same tokens."""

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
        """Takes a model in eval mode, a row that fills physical batches up, and the usual number of rows.

        Rows are continued by at most ``further`` tokens.

        With ``states``, ``read`` returns the mean in float64 of a row's last hidden states instead of logits, and rows cannot be
        continued. "mean" takes all tokens, "cls" the first, and "causal" all but the first, which gets most of the attention and
        says little (so a row of one token has no mean). Rows of an encoder start on the left, where it counts positions from.

        Raises:
            Refused: The model has no cache of keys and values, or accepts no mask or positions.
        """
        accepted = inspect.signature(model.forward).parameters
        self._left = states not in (None, "causal")
        needed = {"attention_mask"} if self._left else {"attention_mask", "position_ids", "past_key_values"}
        if missing := needed - accepted.keys():
            raise Refused(
                f"{type(model).__name__} accepts no {', '.join(sorted(missing))}, so padded rows cannot be read together. Use a "
                "transformer with a cache of keys and values."
            )
        self._model, self._filler, self._states = model, list(filler), states
        self._width = width + 1  # so that no mask is all ones
        self._further = 0 if states else further
        self._device = next(model.parameters()).device
        # RoBERTa counts positions by the tokens that are not padding.
        self._padding = (getattr(model.config, "pad_token_id", None) or 0) if self._left else 0
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._state: list[tuple[Any, Tensor]] = []
        self.height = max(1, min(rows, MOST_TOKENS // self._width))
        contiguous_head(model)

    def read(self, rows: Rows, longer: int = 0) -> NDArray[Any]:
        """Next-token logits of each row, shape (R, V), or mean states, shape (R, D). Rows may be ``longer`` than width."""
        results, self._state, total = [], [], self._width + longer
        for start in range(0, len(rows), self.height):
            part = [*rows[start : start + self.height]]
            part += [self._filler] * (self.height - len(part))
            ids_HW = torch.full((self.height, total), self._padding, dtype=torch.long)
            mask_HW = torch.zeros_like(ids_HW)
            for place, row in enumerate(part):
                first = 0 if self._left else total - len(row)
                ids_HW[place, first : first + len(row)] = torch.tensor(row)
                mask_HW[place, first : first + len(row)] = 1
            results.append(self._pass(ids_HW, mask_HW, None))
        return np.concatenate(results)[: len(rows)]

    def go_on(self, token: int, rows: int) -> NDArray[np.float32]:
        """Next-token logits of the first ``rows`` rows, shape (R, V), after each is continued by ``token``."""
        state, self._state, results = self._state, [], []
        for cache, mask_HW in state:
            longer_HW = torch.cat((mask_HW, torch.ones(self.height, 1, dtype=torch.long)), dim=1)
            results.append(self._pass(torch.full((self.height, 1), token), longer_HW, cache))
        return np.concatenate(results)[:rows]

    @torch.inference_mode()
    def _pass(self, ids: Tensor, mask_HW: Tensor, cache: Any) -> NDArray[Any]:
        places = (mask_HW.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask_HW, "position_ids": places}
        moved = {name: value.to(self._device) for name, value in inputs.items()}
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
        """Lowers the height to 1 if a row's bits depend on its position or on other (synthetic) rows; says whether it did."""
        before = self.height
        # The rounding of experts depends on routing, which a few rows cannot show.
        if has_experts(self._model) or rows_at_once(self._model, 2, self._width + self._further, windows=True) < 2:
            self.height = 1
        if self.height > 1 and self._differs(vocabulary):
            self.height = 1
        return self.height < before

    def _differs(self, vocabulary: int) -> bool:
        """Whether a row's bits depend on other rows: short rows are also read with the longest, which may change them."""
        steps, last = min(STEPS, self._further), self.height - 1
        ends = 0 if self._further <= steps else self._further - steps
        positions = ([0], [last], range(self.height))  # with others, and at every position at once
        near = [(length, 0, positions) for length in sorted({self._width // 2, min(2, self._width - 1)})]
        # At the end of the last text: the longest row has all its tokens, and the short one only those of the steps.
        far = [(min(2, self._width - 1), ends, positions[1:])] if ends else []
        return any(self._bits(vocabulary, *case, steps) > 1 for case in (*near, *far))

    def _bits(self, vocabulary: int, length: int, longer: int, positions: Sequence[Sequence[int]], steps: int) -> int:
        """How many different results a row of this length has among different other rows."""
        draw, outcomes, longest = np.random.default_rng(0), set[tuple[bytes, ...]](), self._width - 1 + longer
        probe = draw.integers(0, vocabulary, length).tolist()
        for places in positions:
            lengths = draw.integers(1, longest + 1, self.height)
            lengths[0 if places[0] else -1] = longest
            rows = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
            rows[::2] = [row[:1] * len(row) for row in rows[::2]]  # one token repeated
            for place in places:
                rows[place] = probe
            logits = [self.read(rows, longer), *(self.go_on(7 + step, self.height) for step in range(steps))]
            outcomes |= {tuple(part[place].tobytes() for part in logits) for place in places}
        return len(outcomes)


class Embedder:
    """Embeds texts as vectors of length 1: the mean of the last hidden states, or a sentence encoder's pooling of them.

    Guarantee:
        A text's vector has the same bits whatever the other texts are. An empty text, or one without a finite mean, has zeros.
    """

    def __init__(self, model: Any, tokenizer: Any, width: int, pooling: Pooling | None = None) -> None:
        """Takes a model in eval mode, its tokenizer, the number of tokens read of a text, and a sentence encoder's pooling.

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
        """The vectors of one or more texts, shape (R, D)."""
        ids = self._tokenizer([text.strip() for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
        before, after = self._around
        found_RD = self._reader.read([[*before, *tokens[: self._width], *after] for tokens in ids])
        return unit_length(found_RD * np.array([[bool(tokens)] for tokens in ids]))


def _template(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after each text, seen around a one-letter text."""
    bare, wrapped = ([*tokenizer("a", add_special_tokens=add, verbose=False)["input_ids"]] for add in (False, True))
    if not bare:
        raise Refused(
            "the encoder's tokenizer gives no token for the letter a, so its prefix and suffix are unknown. Use another encoder."
        )
    start = next(n for n in range(len(wrapped)) if wrapped[n : n + len(bare)] == bare)
    return wrapped[:start], wrapped[start + len(bare) :]


def generation_config(
    tokenizer: Any,
    num_tokens: int,
    ends: Collection[int],
    *,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """The generation settings of transformers for one kind of completion.

    Args:
        tokenizer: Names the padding token, which follows an end token.
        num_tokens: Maximum per prompt, >= 1.
        ends: Tokens that end a text; without any, each text has all its tokens.
        beams: More than 1: beam search, which returns the beam with the highest mean log p of a token.
        temperature: 0: greedy decoding.
        top_p: Samples only from the likeliest tokens that together have this probability, in (0, 1].
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
    """The tokens that end a text: the model's (a chat model may have several) and the tokenizer's."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    ends = inner.generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def until_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """The tokens before the first end token."""
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def write_behind(model: nn.Module, config: GenerationConfig, prompts_ids: Sequence[Sequence[int]]) -> list[Tokens]:
    """Generates a completion of every prompt, many at a time: the same as one at a time up to rounding.

    Args:
        model: A causal language model of transformers, with or without a PEFT adapter, in eval mode.
        config: From ``generation_config``.
        prompts_ids: At least one token each.
    """
    device = next(model.parameters()).device
    beams, num_tokens = int(config.num_beams), int(config.max_new_tokens)
    result: list[Tokens] = [()] * len(prompts_ids)
    # Longest first: rows of similar length need little padding, and too large a batch fails at once.
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
    """The model that generates, without its own defaults, which transformers would use for unset values."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    defaults = inner.generation_config
    inner.generation_config = GenerationConfig()
    try:
        yield inner
    finally:
        inner.generation_config = defaults
