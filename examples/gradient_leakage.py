"""What the gradient of one step gives away, and what is left of it once it is clipped and noised.

    python examples/gradient_leakage.py     # 15 seconds on a CPU; downloads nothing

In federated training, or wherever gradients are shared, somebody sees the gradient of a step. That of LoRA's first factor is
dA = sum over tokens of (B^T delta) x^T, so its rows lie in the span of the layer's inputs x; and in the first block x depends
on nothing but the token. Every token of the vocabulary can thus be asked whether its x lies in that span: the span check of
DAGER (Petrov et al. 2024). It is run on the plain gradient, on the clipped one (which is no defence), and on what
``dpllm.Engine`` hands to the optimizer.

An adapter that is trained in one place and then released exposes no gradients. That this attack fails on a noised gradient
shows little, since stronger ones exist; the last line printed bounds them all.

Shape suffixes: K tokens of the vocabulary, G rows of a gradient, D inputs of a layer, P trainable coordinates.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from statistics import NormalDist

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpllm

SENTENCES = (
    "The gate code is 5211.",
    "Dr Halvorsen moved north.",
    "Anna owes Ben nine euros.",
    "Pay the invoice today.",
)
TARGETS = ["q_proj", "k_proj", "v_proj"]  # of one block, they read the same input
FIRST = "base_model.model.model.layers.0.self_attn."
RANK = 16
EPSILON = 3.0  # of the one step
MAX_GRAD_NORM = 0.1  # C, below the norm of every gradient here
RANK_TOLERANCE = 1e-5  # of the largest singular value: what float32 leaves of a zero


def adapted_model(seed: int) -> nn.Module:
    """A model whose B is not zero, as after some steps; at the very first one, the gradient of A is zero."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(dpllm.builtin.path("builtin:tiny"))
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False))


def units_of(sentences: tuple[str, ...]) -> list[dpllm.Unit]:
    """Each sentence is a person's only row; every token but the first is a target."""
    tokenizer = AutoTokenizer.from_pretrained(dpllm.builtin.path("builtin:tiny"))
    rows = [tuple(tokenizer(text)["input_ids"]) for text in sentences]
    return [dpllm.Unit((dpllm.TokenSequence(ids, (False, *[True] * (len(ids) - 1)), len(ids) - 1),)) for ids in rows]


def plain_gradient(model: nn.Module, unit: dpllm.Unit) -> Tensor:
    """gradient_P of one unit's mean loss."""
    ids = torch.tensor([unit.sequences[0].input_ids])
    loss = model(input_ids=ids, labels=ids).loss
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained(model))])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def released_gradient(model: nn.Module, units: list[dpllm.Unit]) -> Tensor:
    """What one step of the engine hands to the optimizer, times B: SGD at learning rate B moves the weights by just that."""
    plan = dpllm.promise(len(units), epsilon=EPSILON, batch_size=len(units), steps=1, max_grad_norm=MAX_GRAD_NORM)
    before_P = torch.cat([parameter.detach().flatten() for parameter in trained(model)])
    length = max(len(unit.sequences[0].input_ids) for unit in units)
    optimizer = torch.optim.SGD(trained(model), lr=len(units))
    with (
        tempfile.TemporaryDirectory() as folder,
        dpllm.Ledger(Path(folder) / "ledger.sqlite") as ledger,
        dpllm.Engine(model, optimizer, plan, units, ledger=ledger, dataset="demo", max_length=length) as engine,
    ):
        engine.step()
    return before_P - torch.cat([parameter.detach().flatten() for parameter in trained(model)])


def first_layers(model: nn.Module, gradient_P: Tensor) -> Tensor:
    """gradient_GD of the A matrices that read the first block's input, one below the other."""
    named = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    parts_P = torch.split(gradient_P, [size for _, size in named])
    wanted = {f"{FIRST}{target}.lora_A.default.weight" for target in TARGETS}
    return torch.cat([part.view(RANK, -1) for (name, _), part in zip(named, parts_P, strict=True) if name in wanted])


def inputs_of_all_tokens(model: nn.Module) -> Tensor:
    """input_KD: what those matrices read for each token of the vocabulary."""
    seen: list[Tensor] = []
    layer = model.get_submodule(f"{FIRST}q_proj")
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][:, 0].detach()))
    with torch.no_grad():
        model(input_ids=torch.arange(model.get_input_embeddings().weight.shape[0])[:, None])
    handle.remove()
    return seen[0]


def recovered(gradient_GD: Tensor, input_KD: Tensor, tokens: set[int]) -> tuple[float, float]:
    """The rank AUC of the batch's tokens against all others, and the share of them among as many best candidates."""
    _, values, basis = torch.linalg.svd(gradient_GD.double(), full_matrices=False)
    basis = basis[values > RANK_TOLERANCE * values.max()]
    direction_KD = nn.functional.normalize(input_KD.double(), dim=-1)
    span_K = (direction_KD @ basis.T).square().sum(dim=-1)  # how much of an input lies in the row space
    member_K = torch.isin(torch.arange(len(span_K)), torch.tensor(sorted(tokens)))
    beaten = (span_K[member_K][:, None] > span_K[~member_K]).double().mean()
    return float(beaten), float(member_K[span_K.topk(len(tokens)).indices].double().mean())


def attack(seed: int = 0) -> dict[str, tuple[float, float]]:
    """AUC and recall of the span check on each of the three gradients; ``seed`` is of the adapter's weights alone."""
    model, units = adapted_model(seed), units_of(SENTENCES)
    tokens = {token for unit in units for token in unit.sequences[0].input_ids[:-1]}  # the last one only is predicted
    input_KD = inputs_of_all_tokens(model)
    each = [plain_gradient(model, unit) for unit in units]
    gradients = {
        "raw": sum(each),
        "clipped": sum(one * min(1.0, MAX_GRAD_NORM / float(one.norm())) for one in each),
        "released": released_gradient(model, units),
    }
    return {name: recovered(first_layers(model, one), input_KD, tokens) for name, one in gradients.items()}


def bound(prior: float) -> float:
    """What no reconstruction from one released step exceeds, where a guess is right with probability ``prior``.

    References:
        Hayes et al. 2023, Bounding Training Data Reconstruction in DP-SGD: Phi(Phi^-1(prior) + 1 / sigma).
    """
    plan = dpllm.promise(len(SENTENCES), epsilon=EPSILON, batch_size=len(SENTENCES), steps=1)
    return NormalDist().cdf(NormalDist().inv_cdf(prior) + 1 / plan.noise_multiplier)


def main() -> None:
    """Prints what each gradient gives away."""
    print("gradient   AUC    tokens found")
    for name, (auc, recall) in attack().items():
        print(f"{name:<10} {auc:.3f}  {recall:.0%}")
    print(f"A guess right once in 10,000 times is right at most {math.ceil(bound(1e-4) * 1e4)} times after this step.")


if __name__ == "__main__":
    main()
