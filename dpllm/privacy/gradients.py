"""One parameter's gradient of every unit, in the cheapest exact form, until the clipping factors are known.

Comes in: parts, as the layer rules give them. Goes out: each unit's norm, and the sum under given factors.

Shape suffixes: R rows of a physical batch, U units, T tokens, N tokens of one unit, K vectors looked up, P coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpllm.privacy.rules import Dense, Part, Product, Rows

ROUNDING = 2.0**-53  # of float64
TOKENS = 2**20  # of a physical batch; a constant, so that no unit's bound follows how many the others have
GRAM_PRECISION = 1e-8  # of a squared norm, beyond which Gram products are not relied on
CHUNK = 2**21  # float64 numbers of a temporary: 16 MiB


@dataclass(frozen=True)
class Owners:
    """Which unit each row of a physical batch belongs to; -1 is nobody (a dummy row)."""

    unit_R: Tensor
    num_units: int

    @functools.cached_property
    def one_to_one(self) -> bool:
        """Row r is unit r."""
        return self.unit_R.tolist() == list(range(self.num_units))

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """The rows of each unit."""
        owners = self.unit_R.tolist()
        return [[row for row, owner in enumerate(owners) if owner == unit] for unit in range(self.num_units)]


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
            gradient_U = self._by_unit(part.gradient_R)
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
                self.add(Dense(item.left_RTi.float().transpose(1, 2) @ item.right_RTj.float()))
            if looked_up:
                if self._dense_U is None:
                    self._dense_U = self.parameter.new_zeros(
                        (self.owners.num_units, *self.parameter.shape), dtype=torch.float32
                    )
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
        square_U = torch.zeros(self.owners.num_units, dtype=torch.float64, device=self.parameter.device)
        compact = self._looked_up() if self._rows else None
        if compact and not self._products:
            return square_U.index_add_(0, compact[0], compact[2].double().square().sum(dim=1))
        all_tokens = sum(item.left_RTi.shape[0] * item.left_RTi.shape[1] for item in self._products)
        for unit in range(self.owners.num_units):
            left_Ni, right_Nj = self._factors(unit)
            mine = compact[0] == unit if compact else None
            looked_up = (compact[1][mine], compact[2][mine].double()) if compact else None
            square_U[unit] = _upper_bound(left_Ni, right_Nj, looked_up, all_tokens).square()
        return square_U

    def add_to(self, sum_: Tensor, factor_U: Tensor, finite: Sequence[bool]) -> None:
        """Adds the units' gradients times ``factor_U`` (float64) into ``sum_`` (float64, the parameter's shape).

        A unit that is not ``finite`` is left out.
        """
        if self._dense_U is not None:
            self._add_dense(self._dense_U, sum_, factor_U, finite)
            return
        if self._rows:
            unit_K, id_K, values_Kd = self._looked_up()
            if not all(finite):
                kept_K = torch.tensor(finite, device=unit_K.device)[unit_K]
                unit_K, id_K, values_Kd = unit_K[kept_K], id_K[kept_K], values_Kd[kept_K]
            target = sum_.T if self._rows[0].columns else sum_
            target.index_add_(0, id_K, values_Kd.double() * factor_U[unit_K, None])
        if self._products:
            kept = [unit for unit, good in enumerate(finite) if good]
            lefts, rights = [], []
            for item in self._products:
                lefts.append(self._tokens(item.left_RTi, kept))
                rights.append(self._tokens(item.right_RTj, kept))
            weight_N = torch.cat([self._token_factors(item.left_RTi, kept, factor_U) for item in self._products])
            _add_product(sum_, _cat(lefts), weight_N, _cat(rights))

    def _add_dense(self, dense_U: Tensor, sum_: Tensor, factor_U: Tensor, finite: Sequence[bool]) -> None:
        if not all(finite):  # 0 * nan is nan: one bad unit would poison everybody's sum
            dense_U[[unit for unit, good in enumerate(finite) if not good]] = 0
        total_P, dense_UP = sum_.view(-1), dense_U.flatten(1)
        size = max(1, CHUNK // 16 // len(dense_UP))  # stays in a processor's cache
        for start in range(0, len(total_P), size):
            total_P[start : start + size].addmv_(dense_UP[:, start : start + size].double().T, factor_U)

    def _by_unit(self, gradient_R: Tensor) -> Tensor:
        if self.owners.one_to_one:
            return gradient_R
        kept_R = self.owners.unit_R >= 0
        gradient_U = gradient_R.new_zeros((self.owners.num_units, *gradient_R.shape[1:]))
        return gradient_U.index_add_(0, self.owners.unit_R[kept_R], gradient_R[kept_R])

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
        """One unit's factors, the tokens of all its rows and calls one after the other."""
        lefts = [self._tokens(item.left_RTi, [unit]) for item in self._products]
        rights = [self._tokens(item.right_RTj, [unit]) for item in self._products]
        return _cat(lefts), _cat(rights)

    def _tokens(self, factor_RTi: Tensor, units: Sequence[int]) -> Tensor:
        """The tokens of some units, (N, i), without a copy where it is one row or all of them."""
        rows = [row for unit in units for row in self.owners.rows[unit]]
        if rows == list(range(len(factor_RTi))):
            return factor_RTi.flatten(0, 1)
        return factor_RTi[rows[0]] if len(rows) == 1 else factor_RTi[rows].flatten(0, 1)

    def _token_factors(self, factor_RTi: Tensor, units: Sequence[int], factor_U: Tensor) -> Tensor:
        owner_N = [unit for unit in units for _ in self.owners.rows[unit]]
        return factor_U[owner_N].repeat_interleave(factor_RTi.shape[1])


def _upper_bound(left_Ni: Tensor, right_Nj: Tensor, looked_up: tuple[Tensor, Tensor] | None, all_tokens: int) -> Tensor:
    """An upper bound on the norm of one unit's left.T @ right, plus the vectors it looked up at some of its rows."""
    tokens, i, j = len(left_Ni), left_Ni.shape[1], right_Nj.shape[1]
    size = _sizes(left_Ni, right_Nj)  # the sum of the norms of the terms
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


def _sizes(left_Ni: Tensor, right_Nj: Tensor) -> Tensor:
    left_N: Tensor = torch.linalg.vector_norm(left_Ni, dim=1, dtype=torch.float64)
    right_N: Tensor = torch.linalg.vector_norm(right_Nj, dim=1, dtype=torch.float64)
    return (left_N * right_N).sum()


def _gram(factor_Ni: Tensor) -> Tensor:
    gram_NN = factor_Ni.new_zeros((len(factor_Ni), len(factor_Ni)), dtype=torch.float64)
    for chunk in torch.split(factor_Ni, max(1, CHUNK // max(1, len(factor_Ni))), dim=1):
        chunk = chunk.double()
        gram_NN.addmm_(chunk, chunk.T)
    return gram_NN


def _add_product(sum_: Tensor, left_Ni: Tensor, weight_N: Tensor, right_Nj: Tensor) -> None:
    """Sum += left.T @ diag(weight) @ right, in float64, by chunks of left's columns (a head's vocabulary)."""
    if not len(left_Ni):
        return
    right, start = right_Nj.double() * weight_N[:, None], 0
    for chunk in torch.split(left_Ni, max(1, CHUNK // max(1, len(left_Ni))), dim=1):
        sum_[start : start + chunk.shape[1]].addmm_(chunk.double().T, right)
        start += chunk.shape[1]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
