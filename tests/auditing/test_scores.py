"""Scoring: the right tokens, the right numbers whatever shares the batch, and tables without texts."""

import contextlib
import math
import random

import numpy as np
import pytest
import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dpllm.auditing import attacks, scores
from dpllm.auditing.scores import score, score_canaries
from dpllm.auditing.table import sum_up
from dpllm.canaries.canaries import plan_canaries
from dpllm.canaries.texts import Canary, encode_secret
from dpllm.errors import ConfigError
from dpllm.privacy.schedule import TokenSequence
from dpllm.recipe.sections import CanaryConfig
from dpllm.text.tokens import encode

VOCABULARY = 300
CANARY = Canary("c00000", 1, "The locker code for the north store of Halvorsen is", "12345678", inserted=True)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE tokenizer that merges some digits, so that secrets have unequal numbers of tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator([f"the code is {n}{n + 1}" for n in range(100, 160)], trainer)
    result = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eos|>")
    result.chat_template = CHAT_TEMPLATE
    return result


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    torch.manual_seed(0)
    if request.param == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        built = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    else:
        built = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128))
    # Larger weights than at initialisation, so that one token's probability depends on the tokens before it.
    for parameter in built.parameters():
        if parameter.dim() > 1:
            parameter.data *= 8
    return built.eval()


def random_sequences(count, seed=0):
    generator = random.Random(seed)
    sequences, masks = [], []
    for _ in range(count):
        length = generator.randint(2, 40)
        ids = tuple(generator.randrange(VOCABULARY) for _ in range(length))
        masks.append((False, *(generator.random() < 0.5 for _ in range(length - 1))))
        sequences.append(TokenSequence(ids, (False, *[True] * (length - 1)), length - 1))
    return sequences, masks


def naive(model, sequence, mask):
    """One sequence at a time, whole softmax, one token at a time."""
    logits = model(input_ids=torch.tensor([sequence.input_ids])).logits[0].double()
    table = torch.log_softmax(logits, dim=-1)
    places = [t for t, scored in enumerate(mask) if scored]
    log_probs = [table[t - 1, sequence.input_ids[t]].item() for t in places]
    moments = [(table[t - 1].exp() * table[t - 1]).sum().item() for t in places]
    squares = [(table[t - 1].exp() * table[t - 1].square()).sum().item() for t in places]
    variances = [square - mean**2 for square, mean in zip(squares, moments, strict=True)]
    kept = [set(table[t - 1].topk(40).indices.tolist()) for t in places]
    sampled = [
        log_prob - table[t - 1, sorted(best)].logsumexp(0).item() if sequence.input_ids[t] in best else -math.inf
        for t, log_prob, best in zip(places, log_probs, kept, strict=True)
    ]
    greedy = [table[t - 1].argmax().item() == sequence.input_ids[t] for t in places]
    return log_probs, greedy, moments, variances, sampled


@torch.no_grad()
def test_scores_equal_the_definition(model):
    sequences, masks = random_sequences(30)
    for sequence, mask, found in zip(sequences, masks, score(model, sequences, masks, 200), strict=True):
        log_probs, matches, means, variances, sampled = naive(model, sequence, mask)
        assert found.log_prob == pytest.approx(log_probs, abs=1e-4)
        assert found.argmax.tolist() == matches
        assert found.mean == pytest.approx(means, abs=1e-4)
        assert found.variance == pytest.approx(variances, abs=1e-3)
        assert found.top_k_log_prob == pytest.approx(sampled, abs=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 39, 40, 41, 64, 2560, 2624, 5000])
def test_the_largest_logits_are_found_whatever_the_vocabulary(vocabulary):
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[3] = logits[3].sort().values  # all of them in the last blocks
    logits[4] = -torch.inf
    logits[4, 0] = 0.0
    result = scores._largest(logits).sort(dim=-1, descending=True).values
    assert torch.equal(result, logits.sort(dim=-1, descending=True).values[:, :40])


def test_of_equally_likely_tokens_greedy_decoding_chooses_one():
    logits = torch.zeros(1, 3, 8)
    result = scores._gather(logits, torch.tensor([[5, 0, 3]]), torch.tensor([[False, True, True]]))
    assert result.argmax.tolist() == [True, False]
    assert result.log_prob == pytest.approx([-math.log(8)] * 2)


def test_a_forbidden_token_weighs_nothing():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0, 0.0]]])
    result = scores._gather(logits, torch.tensor([[3, 1]]), torch.tensor([[False, True]]))
    assert result.mean == pytest.approx([-math.log(2)])
    assert result.variance == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("budget", [1, 64, 333, 10**6])
def test_scores_do_not_depend_on_batch_or_padding_or_order(model, budget):
    sequences, masks = random_sequences(24)
    alone = [score(model, [s], [m], 1)[0] for s, m in zip(sequences, masks, strict=True)]
    order = random.Random(budget).sample(range(24), 24)
    together = score(model, [sequences[i] for i in order], [masks[i] for i in order], budget)
    for index, found in zip(order, together, strict=True):
        assert np.abs(found.log_prob - alone[index].log_prob).max(initial=0) < 1e-4
        assert found.argmax.tolist() == alone[index].argmax.tolist()


def test_chunks_of_the_softmax_do_not_change_scores(model, monkeypatch):
    sequences, masks = random_sequences(20)
    whole = score(model, sequences, masks, 500)
    monkeypatch.setattr(scores, "_LOGITS_PER_CHUNK", {"cpu": 3 * VOCABULARY})
    for one, other in zip(whole, score(model, sequences, masks, 500), strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5)


def test_batches_hold_the_budget_and_every_row_once():
    lengths = [random.Random(1).randint(1, 50) for _ in range(200)]
    order = sorted(range(200), key=lambda index: lengths[index])
    batches = scores._batches(order, lengths, 120)
    assert [row for batch in batches for row in batch] == order
    assert all(len(batch) * max(lengths[row] for row in batch) <= 120 for batch in batches)
    assert len(batches) < 70


def test_scores_that_are_not_finite_are_refused():
    broken = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=1, n_positions=64)).eval()
    broken.transformer.ln_f.weight.data[0] = math.nan
    with pytest.raises(ConfigError, match="not finite"):
        score(broken, *random_sequences(3), 100)


@pytest.mark.parametrize("fmt", ["text", "prompt_completion", "messages"])
def test_the_secret_is_found_in_the_encoding_that_trains(tokenizer, fmt):
    sequence, mask = encode_secret(CANARY, fmt, tokenizer, tiny.reads(128, "truncate"))
    assert sequence == encode(CANARY.example(fmt), fmt, tokenizer, tiny.reads(128, "truncate"))[0]
    ids = [token for token, scored in zip(sequence.input_ids, mask, strict=True) if scored]
    assert tokenizer.decode(ids).strip() == CANARY.secret
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in ids
    assert not any(scored and not target for scored, target in zip(mask, sequence.loss_mask, strict=True))


def test_secrets_of_every_tokenisation_are_found(tokenizer):
    plan = plan_canaries(CanaryConfig(groups={1: 50}, references=100), generator=random.Random(0))
    counts = set()
    for canary in plan.canaries:
        sequence, mask = encode_secret(canary, "text", tokenizer, tiny.reads(128, "refuse"))
        ids = [token for token, scored in zip(sequence.input_ids, mask, strict=True) if scored]
        assert tokenizer.decode(ids).strip() == canary.secret
        counts.add(sum(mask))
    assert len(counts) > 1


@pytest.mark.parametrize("long_examples", ["truncate", "chunk", "refuse"])
def test_a_canary_that_does_not_fit_is_refused(tokenizer, long_examples):
    length = len(encode(CANARY.example("text"), "text", tokenizer, tiny.reads(128, "refuse"))[0].input_ids)
    with pytest.raises(ConfigError, match="canary c00000") as caught:
        encode_secret(CANARY, "text", tokenizer, tiny.reads(length - 3, long_examples))
    assert CANARY.secret not in str(caught.value)
    assert CANARY.carrier not in str(caught.value)


class Pair:
    """Two models as ``dpllm.model.loading.load_for_scoring`` gives them."""

    def __init__(self, tokenizer, tuned: nn.Module, base: nn.Module):
        self.tokenizer, self.tuned, self._base = tokenizer, tuned, base

    @contextlib.contextmanager
    def base(self):
        yield self._base


def test_the_table_holds_both_models_and_every_canary_once(tokenizer, model):
    plan = plan_canaries(CanaryConfig(groups={1: 20, 2: 10}, references=100), generator=random.Random(0))
    torch.manual_seed(1)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=128)).eval()
    tokens = score_canaries(Pair(tokenizer, model, base), plan, "text", tiny.reads(128, "truncate"))
    table = sum_up(tokens)
    assert tokens.canary_ids == tuple(row.canary_id for row in table)
    for scored, rows in ((tokens.secrets(), table), (tokens, attacks.whole_rows(tokens))):
        for which in ("tuned", "base"):
            sums = np.add.reduceat(getattr(scored, f"{which}_log_prob_N"), scored.starts())
            np.testing.assert_allclose(sums, [getattr(row, f"{which}_log_prob") for row in rows])
    everyone = {canary.canary_id: canary for canary in (*plan.canaries, *plan.references)}
    assert sorted(row.canary_id for row in table) == sorted(everyone)
    words: set[tuple[int, int]] = set()
    for row in table[::17]:
        canary = everyone[row.canary_id]
        sequence, mask = encode_secret(canary, "text", tokenizer, tiny.reads(128, "truncate"))
        assert row.tuned_log_prob == pytest.approx(sum(naive(model, sequence, mask)[0]), abs=1e-3)
        assert row.base_log_prob == pytest.approx(sum(naive(base, sequence, mask)[0]), abs=1e-3)
        trained = sequence.loss_mask
        (whole,) = (whole_row for whole_row in attacks.whole_rows(tokens) if whole_row.canary_id == row.canary_id)
        assert sum(trained) > sum(mask)
        assert whole.tuned_log_prob == pytest.approx(sum(naive(model, sequence, trained)[0]), abs=1e-3)
        assert whole.base_log_prob == pytest.approx(sum(naive(base, sequence, trained)[0]), abs=1e-3)
        ids = [token for token, learned in zip(sequence.input_ids, trained, strict=True) if learned]
        numbers = tokens.word_N[tokens.sequence_N == tokens.canary_ids.index(row.canary_id)].tolist()
        words |= set(zip(numbers, ids, strict=True))
        assert row.tuned_greedy == all(naive(model, sequence, mask)[1])
        assert row.group == canary.group
        assert row.inserted == (None if canary.canary_id.startswith("r") else canary.inserted)
    assert len({number for number, _ in words}) == len({token for _, token in words}) == len(words)
