"""Roundings that were done to Hugging Face's matrices before the table put them together, and FP8 that is stored as such.

A block of 128 x 128 of a Hugging Face matrix is no block of a packed one, so what was rounded there is rounded there again, and what an
FP8 directory holds is looked at code by code, under its own scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from bisect_tool.arithmetic import FP8_BLOCK, Quantised, roundings
from bisect_tool.compare import Row, same_tensor
from bisect_tool.hf_directory import Dequantised
from bisect_tool.orders import Change
from bisect_tool.places import Place, Shape, Tensor, steps
from bisect_tool.sides import Cast, Expected

BLOCK, WHOLE = f"block of {FP8_BLOCK}", "tensor"
LARGEST = 4 << 30
POWERS = "powers of two (the scales of FP8 blocks)"


@dataclass(frozen=True)
class _Made:
    """A tensor whose rows are computed; who is one says how."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def unit(self) -> int:
        return self.tensor.unit

    def rows(self, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        rows = self.rows(start, stop)
        return [(tuple(slice(0, n) for n in rows.shape), rows)]

    def empty(self, start: int, stop: int) -> bool:
        return False

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        return self.rows(index, index + 1)[0, list(rows), :width]


@dataclass(frozen=True)
class Through(_Made):
    """A tensor rounded.  halves  of an expert's gate and up, which were matrices of their own"""

    apply: Quantised
    halves: bool = False

    def rows(self, start: int, stop: int) -> torch.Tensor:
        if len(self.shape) == 3:
            found = self.tensor.rows(start, stop)
            made = [self._one(part) for one in found for part in (one.chunk(2) if self.halves else (one,))]
            return torch.cat(made).reshape(found.shape)
        if self.apply.grain == WHOLE:
            return self._one(self.tensor.rows(0, self.shape[0]))[start:stop]
        first = start // FP8_BLOCK * FP8_BLOCK
        last = min(-(-stop // FP8_BLOCK) * FP8_BLOCK, self.shape[0])
        return self._one(self.tensor.rows(first, last))[start - first : stop - first]

    def _one(self, matrix: torch.Tensor) -> torch.Tensor:
        return self.apply(matrix)


@dataclass(frozen=True)
class Codes(_Made):
    """The bytes of an FP8 matrix."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor.rows(start, stop).view(torch.uint8)


@dataclass(frozen=True)
class Scales(_Made):
    """The scale of every element of an FP8 matrix."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, start: int, stop: int) -> torch.Tensor:
        assert isinstance(self.tensor, Dequantised)
        ones = torch.ones(stop - start, *self.shape[1:])
        first = start // self.tensor.block[0] if len(self.shape) == 2 else start
        return ones * self._spread(first, start, stop)

    def _spread(self, first: int, start: int, stop: int) -> torch.Tensor:
        assert isinstance(self.tensor, Dequantised)
        (rows, columns), scale = self.tensor.block, self.tensor.scale
        if len(self.shape) == 2:
            spread = scale.rows(first, -(-stop // rows)).float().repeat_interleave(rows, 0)[start - first * rows : stop - first * rows]
        else:
            spread = scale.rows(start, stop).float().repeat_interleave(rows, -2)[..., : self.shape[-2], :]
        return spread.repeat_interleave(columns, -1)[..., : self.shape[-1]]


def in_fp8(tensor: Tensor) -> Expected | None:
    """The tensor as the table makes it, if all it is made of is FP8."""
    whole = tensor.tensor if isinstance(tensor, Cast) else tensor
    return whole if isinstance(whole, Expected) and all(isinstance(source, Dequantised) for source in whole.sources) else None


def nearest(coarse: Expected, fine: Tensor) -> bool:
    """Whether FP8 matrices hold, under their own scales, the nearest code to every element of another tensor."""
    codes = replace(coarse, sources=tuple(Codes(source.weight) for source in coarse.sources if isinstance(source, Dequantised)))
    scales = replace(coarse, sources=tuple(Scales(source) for source in coarse.sources))
    kind = next(source.weight.dtype for source in coarse.sources if isinstance(source, Dequantised))
    row = Row(scales, fine)
    return all(
        _coded(fine.rows(start, stop), scales.rows(start, stop), codes.rows(start, stop), kind)
        for start, stop in steps(coarse.shape[0], row.unit, row.bytes)
    )


def _coded(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> bool:
    """Quantisers divide by the scale, or multiply with what 1 / scale is."""
    wide = values.float()
    one, other = ((wide / scales).to(kind).view(torch.uint8), (wide * (1 / scales)).to(kind).view(torch.uint8))
    return bool(((one == codes) | (other == codes)).all())


def before_packing(expected: Tensor, candidate: Tensor, *, halves: bool) -> Change | None:
    """A rounding in blocks that was done to the matrices that a tensor is made of."""
    whole = expected.tensor if isinstance(expected, Cast) else expected
    if not isinstance(whole, Expected) or whole.rule.op.lossy or any(len(source.shape) < 2 for source in whole.sources):
        return None
    for through, apply in roundings():
        if not isinstance(apply, Quantised) or apply.grain not in (BLOCK, WHOLE):
            continue
        made = replace(whole, sources=tuple(Through(source, apply, halves) for source in whole.sources))
        if same_tensor(Cast(made, candidate.dtype), candidate):
            return Change(
                "rounded", {"through": through}, apply,
                f"round the matrices it is made of through {through}, compare every byte", "unrounded it differs",
            )  # fmt: skip
    return None


def scales_rounded(expected: Tensor, candidate: Tensor) -> Change | None:
    """FP8 codes that are right under the largest of each block / 448, beside scales that are that rounded up to a power of two."""
    coarse, whole = in_fp8(candidate), expected.tensor if isinstance(expected, Cast) else expected
    if coarse is None or not isinstance(whole, Expected) or math.prod(candidate.shape) * candidate.dtype.itemsize > LARGEST:
        return None
    theirs = dict(zip(whole.rule.references, whole.sources, strict=True))
    names = coarse.rule.references
    if all(name in theirs for name in names):
        wanted = [theirs[name].rows(0, theirs[name].shape[0]) for name in names]
    elif len(coarse.rule.candidates) == 1:
        wanted = coarse.rule.op.backward([expected.rows(0, expected.shape[0])])
    else:
        return None
    for want, source in zip(wanted, coarse.sources, strict=True):
        assert isinstance(source, Dequantised)
        right = Quantised("float8_e4m3fn", 448.0, BLOCK).scales(want)
        shown = Scales(source).rows(0, source.shape[0])
        codes = Codes(source.weight).rows(0, source.shape[0])
        if source.block != (FP8_BLOCK, FP8_BLOCK) or not torch.equal(shown, torch.exp2(torch.ceil(torch.log2(right)))):
            return None
        if not _coded(want, right, codes, source.weight.dtype):
            return None
    return Change(
        "rounded", {"through": POWERS}, lambda block: block,
        "round the scale of each block up to a power of two and leave the codes as they are: every code and every scale",
        "with the scale as it was, the largest of the block / 448, every code is the nearest",
    )  # fmt: skip
