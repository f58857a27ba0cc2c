"""One parameter's gradient of every unit, in the cheapest exact form, until the clipping factors are known.

Comes in: parts, as the layer rules give them. Goes out: each unit's norm, and the sum under given factors.

What is computed for one unit never has a shape that other units decide: units stand in one place for each row of the physical
batch, empty places among them, and what is added up is added in the order of a unit's own rows.

Shape suffixes: R rows of a physical batch, U = R places of units, T tokens, N tokens of one unit, K vectors looked
up, P coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dpllm.privacy.rules import Dense, Part, Product, Rows, multiplied

ROUNDING = 2.0**-53  # of float64
TOKENS = 2**20  # of a physical batch; a constant, so that no unit's bound follows how many the others have
GRAM_PRECISION = 1e-8  # of a squared norm, beyond which Gram products are not relied on
CHUNK = 2**21  # float64 numbers of a temporary: 16 MiB
TOGETHER = {"cpu": CHUNK // 16}  # of one that stays in a processor's cache
TOGETHER_ELSEWHERE = 4 * CHUNK  # a GPU would spend its time on starting kernels


@dataclass(frozen=True)
class Owners:
    """Which unit each row of a physical batch belongs to; -1 for a padding row."""

    unit_R: Tensor
    num_units: int

    @property
    def places(self) -> int:
        """U: places for units, as many as there are rows; the first ``num_units`` are taken."""
        return len(self.unit_R)

    @functools.cached_property
    def one_to_one(self) -> bool:
        """Row r is unit r, or a padding row."""
        return all(owner in (row, -1) for row, owner in enumerate(self.unit_R.tolist()))

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """The rows of each unit."""
        found: list[list[int]] = [[] for _ in range(self.num_units)]
        for row, owner in enumerate(self.unit_R.tolist()):
            if owner >= 0:
                found[owner].append(row)
        return found

    @functools.cached_property
    def rounds(self) -> list[tuple[Tensor, Tensor]]:
        """(units, rows): the first row of every unit, then the second of those that have one, and so on."""
        most = max(map(len, self.rows), default=0)
        of_round = [[unit for unit, rows in enumerate(self.rows) if len(rows) > turn] for turn in range(most)]
        chosen = [(units, [self.rows[unit][turn] for unit in units]) for turn, units in enumerate(of_round)]
        return [(self.unit_R.new_tensor(units), self.unit_R.new_tensor(rows)) for units, rows in chosen]


@dataclass
class UnitGradients:
    """What the calls of a parameter's layers have contributed in one backward pass.

    A parameter may be used by several calls and several layers (a tied head): their gradients are added before any norm
    is taken, cross terms included.
    """

    parameter: nn.Parameter
    owners: Owners
    _dense_U: Tensor | None = None
    _products: list[Product] = field(default_factory=list)
    _rows: list[Rows] = field(default_factory=list)
    _found: tuple[Tensor, Tensor, Tensor] | None = None  # what _looked_up returned: measured, and summed as measured

    def add(self, part: Part) -> None:
        """Takes the contribution of one call of one layer."""
        if isinstance(part, Product):
            self._products.append(part)
        elif isinstance(part, Rows):
            self._rows.append(part)
            self._found = None
        else:
            gradient_U = part.gradient_R
            if not self.owners.one_to_one:
                gradient_U = torch.zeros_like(part.gradient_R)
                for units, rows in self.owners.rounds:
                    gradient_U[units] += part.gradient_R[rows]
            self._dense_U = gradient_U if self._dense_U is None else self._dense_U.add_(gradient_U)

    @property
    def empty(self) -> bool:
        """No layer of this parameter was called."""
        return self._dense_U is None and not self._products and not self._rows

    def dense(self) -> Tensor:
        """gradient_U in float32: (U, *parameter.shape)."""
        if self._products or self._rows:
            looked_up = self._looked_up() if self._rows else None
            columns = bool(self._rows) and self._rows[0].columns
            products, self._products, self._rows = self._products, [], []
            for item in products:
                self.add(Dense(multiplied(item.left_RTi, item.right_RTj)))
            if looked_up:
                if self._dense_U is None:
                    shape = (self.owners.places, *self.parameter.shape)
                    self._dense_U = self.parameter.new_zeros(shape, dtype=torch.float32)
                unit_K, id_K, values_Kd = looked_up
                target = self._dense_U.transpose(1, 2) if columns else self._dense_U
                target[unit_K, id_K] += values_Kd
        assert self._dense_U is not None
        return self._dense_U

    def square_norm(self) -> Tensor:
        """An upper bound of each unit's squared L2 norm, float64: exact but for the last bits.

        Materialised gradients are measured in float64 as they are. Of factors, a squared norm is a sum of Gram products
        that can cancel, so that float32 loses it altogether; here it is accumulated in float64 and increased by a bound
        on the rounding that is left, of the norm as of the sum that ``add_to`` forms. Where even float64 would lose more
        than the eighth digit, the gradient itself is formed, chunk by chunk.

        References:
            Goodfellow 2015, Efficient Per-Example Gradient Computations; Li et al. 2021, section 4, equation 2; for the
            bound, Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1.
        """
        if self._dense_U is not None or (self._products and len(self._rows) and self._rows[0].columns):
            dense_U = self.dense()
            norm_U: Tensor = torch.linalg.vector_norm(dense_U.flatten(1), dim=1, dtype=torch.float64)
            return norm_U.square_()
        square_U = torch.zeros(self.owners.places, dtype=torch.float64, device=self.parameter.device)
        compact = self._looked_up() if self._rows else None
        if compact and not self._products:
            for unit in range(self.owners.num_units):
                square_U[unit] = compact[2][compact[0] == unit].double().square().sum()
            return square_U
        all_tokens = sum(item.left_RTi.shape[0] * item.left_RTi.shape[1] for item in self._products)
        for unit in range(self.owners.num_units):
            left_Ni, right_Nj = self._factors(unit)
            mine = compact[0] == unit if compact else None
            looked_up = (compact[1][mine], compact[2][mine].double()) if compact else None
            square_U[unit] = _upper_bound(left_Ni, right_Nj, looked_up, all_tokens).square()
        return square_U

    def add_to(self, sum_: Tensor, factor_U: Tensor, counted: Sequence[bool]) -> None:
        """Adds the counted units' gradients times ``factor_U``, each rounded to whole numbers, into ``sum_``, in float64.

        The sum of whole numbers below 2^53 is exact, so it is the same in any order and any company.
        """
        if self._dense_U is not None:
            self._add_dense(self._dense_U, sum_, factor_U, counted)
            return
        if self._rows:
            unit_K, id_K, values_Kd = self._looked_up()
            kept_K = torch.tensor(counted, device=unit_K.device)[unit_K]
            unit_K, id_K, values_Kd = unit_K[kept_K], id_K[kept_K], values_Kd[kept_K]
            target = sum_.T if self._rows[0].columns else sum_
            target.index_add_(0, id_K, (values_Kd.double() * factor_U[unit_K, None]).round_())
        if self._products:
            for unit in range(self.owners.num_units):
                if counted[unit]:
                    left_Ni, right_Nj = self._factors(unit)
                    _add_product(sum_, left_Ni, factor_U[unit], right_Nj)

    def _add_dense(self, dense_U: Tensor, sum_: Tensor, factor_U: Tensor, counted: Sequence[bool]) -> None:
        if not all(counted):  # 0 * nan is nan: one bad unit would poison everybody's sum
            dense_U[[unit for unit, good in enumerate(counted) if not good]] = 0
        total_P, dense_UP = sum_.view(-1), dense_U.flatten(1)
        size = max(1, added_at_once(dense_U.device) // dense_UP.shape[0])
        for start in range(0, total_P.shape[0], size):
            part_UP = dense_UP[:, start : start + size].double().mul_(factor_U[:, None]).round_()
            total_P[start : start + size].add_(part_UP.sum(dim=0))

    def _looked_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """(unit_K, id_K, values_Kd): the sum of the vectors of each unit at each index, no pair twice, units in order."""
        if self._found is not None:
            return self._found
        vocabulary = self.parameter.shape[1 if self._rows[0].columns else 0]
        keys, values = [], []
        for part in self._rows:
            unit_RT = self.owners.unit_R[:, None].expand_as(part.ids_RT)
            kept_RT = unit_RT >= 0
            keys.append((unit_RT * vocabulary + part.ids_RT)[kept_RT])
            values.append(part.values_RTd[kept_RT])
        key_K, place = torch.unique(_cat(keys), return_inverse=True)
        value = _cat(values)
        values_Kd = value.new_zeros((len(key_K), value.shape[1])).index_add_(0, place, value)
        self._found = key_K // vocabulary, key_K % vocabulary, values_Kd
        return self._found

    def _factors(self, unit: int) -> tuple[Tensor, Tensor]:
        """One unit's factors, the tokens of all its rows and calls one after the other; one row is not copied."""
        rows = self.owners.rows[unit]

        def tokens(factors: Iterable[Tensor]) -> Tensor:
            return _cat([one[rows[0]] if len(rows) == 1 else one[rows].flatten(0, 1) for one in factors])

        return tokens(item.left_RTi for item in self._products), tokens(item.right_RTj for item in self._products)


def add_all(each: list[tuple[UnitGradients, Tensor]], factor_U: Tensor, counted: Sequence[bool]) -> None:
    """``add_to`` of each into its sum; small ones whose sums are neighbours in one vector as if they were one parameter."""
    together: list[UnitGradients] = []
    start = stop = held = 0
    vector: Tensor | None = None  # of which sums are parts

    def add_together() -> None:
        if together:
            assert vector is not None
            dense_UP = torch.cat([gradient.dense().flatten(1) for gradient in together], dim=1)
            replace(together[0], _dense_U=dense_UP).add_to(vector[start:stop], factor_U, counted)
            together.clear()

    each.reverse()
    while each:  # what was added is held by nobody
        gradient, sum_ = each.pop()
        dense_U, offset, base = gradient._dense_U, int(sum_.storage_offset()), sum_._base
        whole = base is not None and base.dim() == 1 and base.storage_offset() == 0 and sum_.is_contiguous()
        most = added_at_once(sum_.device) // 2
        small = dense_U is not None and whole and dense_U.numel() <= most
        if not small or base is not vector or offset != stop or held > most:
            add_together()
            start = stop = offset
            vector, held = base, 0
        if dense_U is None or not small:
            gradient.add_to(sum_, factor_U, counted)
            continue
        together.append(gradient)
        stop, held = stop + sum_.numel(), held + dense_U.numel()
    add_together()


def added_at_once(device: torch.device) -> int:
    """Numbers of materialised gradients that are added at once; the sums are exact, so that it decides nothing but speed."""
    return TOGETHER.get(device.type, TOGETHER_ELSEWHERE)


def _upper_bound(left_Ni: Tensor, right_Nj: Tensor, looked_up: tuple[Tensor, Tensor] | None, all_tokens: int) -> Tensor:
    """An upper bound on the norm of one unit's left.T @ right, plus the vectors it looked up at some of its rows."""
    tokens, i, j = len(left_Ni), left_Ni.shape[1], right_Nj.shape[1]
    left_N, right_N = (torch.linalg.vector_norm(factor, dim=1, dtype=torch.float64) for factor in (left_Ni, right_Nj))
    size: Tensor = (
        left_N * right_N
    ).sum()  # the sum of the norms of the terms: what rounding loses of them is a share of it
    if looked_up:
        size = size + looked_up[1].norm(dim=1).sum()
    of_sum = 2 * max(all_tokens, TOKENS) * ROUNDING * size
    if tokens * (i + j) <= i * j:  # Gram matrices are cheaper than the gradient
        square = (_gram(left_Ni) * _gram(right_Nj)).sum(dim=1).sum()
        roundings = i + j + 2 * tokens + 4
        if looked_up:
            ids_K, values_Kd = looked_up
            head_Kd = left_Ni[:, ids_K].double().T @ right_Nj.double()
            square = square + values_Kd.square().sum(dim=1).sum() + 2 * (head_Kd * values_Kd).sum(dim=1).sum()
            roundings += len(ids_K) + j + tokens
        slack = roundings * ROUNDING * size.square()
        if not bool(slack > GRAM_PRECISION * square):
            return (square + slack).sqrt() + of_sum
    return _norm(left_Ni, right_Nj, looked_up) * (1 + i * j * ROUNDING) + of_sum


def _norm(left_Ni: Tensor, right_Nj: Tensor, looked_up: tuple[Tensor, Tensor] | None) -> Tensor:
    """The norm of the gradient, formed in float64 by chunks of left's columns."""
    right, start = right_Nj.double(), 0
    square = right.new_zeros(())
    for chunk in torch.split(left_Ni, max(1, CHUNK // max(len(left_Ni), right.shape[1], 1)), dim=1):
        gradient_cj = chunk.double().T @ right
        if looked_up:
            here_K = (looked_up[0] >= start) & (looked_up[0] < start + chunk.shape[1])
            gradient_cj[looked_up[0][here_K] - start] += looked_up[1][here_K]
        square += gradient_cj.square_().sum()
        start += chunk.shape[1]
    return square.sqrt_()


def _gram(factor_Ni: Tensor) -> Tensor:
    gram_NN = factor_Ni.new_zeros((len(factor_Ni), len(factor_Ni)), dtype=torch.float64)
    for chunk in torch.split(factor_Ni, max(1, CHUNK // max(1, len(factor_Ni))), dim=1):
        chunk = chunk.double()
        gram_NN.addmm_(chunk, chunk.T)
    return gram_NN


def _add_product(sum_: Tensor, left_Ni: Tensor, factor: Tensor, right_Nj: Tensor) -> None:
    """Sum += factor * left.T @ right rounded, in float64, by chunks of left's columns (a head's vocabulary)."""
    right, start = right_Nj.double() * factor, 0
    for chunk in torch.split(left_Ni, max(1, CHUNK // 4 // max(len(left_Ni), right.shape[1])), dim=1):
        sum_[start : start + chunk.shape[1]].add_((chunk.double().T @ right).round_())
        start += chunk.shape[1]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
