"""Numbers that were changed where they are: constants, scales, offsets, roundings, fresh initialisation.

Except for an initialisation, which has no bytes to check, a change is proposed from a sample and holds only where applying it gives
every byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from bisect_tool.compare import bits, same_bytes
from bisect_tool.orders import Change
from bisect_tool.places import Tensor, steps

SAMPLE = 1 << 16
FP8_BLOCK = 128
# with fewer elements than this, statistics tell nothing
FRESH = 512
# a number of more significant digits was not what a person wrote
SHORT = 2
# significant bits of a dtype, the hidden one included
PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def constant(tensor: Tensor, start: int, stop: int) -> float | None:
    """The one value that rows start..stop hold, or None."""
    first: torch.Tensor | None = None
    for a, b in steps(stop - start, tensor.unit, _row_bytes(tensor)):
        for _, part in tensor.parts(start + a, start + b):
            flat = bits(part).flatten()
            first = flat[0] if first is None else first
            if not bool((flat == first).all()):
                return None
    return float(tensor.rows(start, start + tensor.unit).flatten()[0])


def constant_change(value: float, experiment: str = "every element compared with it") -> Change:
    """What a constant block is called."""
    if value == 0:
        return Change("zero", {}, lambda block: torch.zeros_like(block), "every element compared with 0", "the reference's is not zero")
    if math.isnan(value):
        fill = float("nan")
        return Change("nan", {}, lambda block: torch.full_like(block, fill), "every element is NaN", "the reference's is finite")
    detail = {"distribution": "constant", "value": value}
    return Change(
        "init", detail, lambda block: torch.full_like(block, value), f"{experiment} ({value:g})", "the reference's is not constant"
    )


def moved(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    """A scale, an offset or a rounding that makes `got` of `want`, or None.  Both in the stored dtype."""
    if want.shape != got.shape or got.dtype not in PRECISION:
        return None
    return _scaled(want, got) or _offset(want, got) or _rounded(want, got)


def of_one(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    """What made one number of another.  A factor and an addend always fit: the one of fewer digits is named, the other beside it."""
    both = [change for change in (_scaled(want, got), _offset(want, got)) if change is not None]
    short = sorted((change for change in both if _digits(change) <= SHORT), key=_digits)
    return replace(short[0], also=tuple({"kind": one.kind, "detail": one.detail} for one in short[1:])) if short else None


def _digits(change: Change) -> int:
    """Significant digits of how far from nothing a change goes: times 1.02 has one, plus 0.25 two."""
    away = change.detail["value"] - (change.kind == "scale")
    return len(f"{abs(away):.9g}".partition("e")[0].replace(".", "").strip("0"))


def _scaled(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    w, g, slack = _sampled(want, got)
    usable = (w != 0) & (g != 0)
    if not bool(usable.any()) or bool(((w == 0) != (g == 0)).any()):
        return None
    w, g, slack = w[usable], g[usable], slack[usable]
    ends = torch.stack([(g - slack) / w, (g + slack) / w]).sort(0).values
    for value, times in product(simplest(float(ends[0].max()), float(ends[1].min())), (_times, _times_once)):
        change = Change(
            "scale", {"value": value}, partial(times, value=value),
            f"multiply the reference by {value:g}, compare every byte", "as it is, the reference differs by {before}",
        )  # fmt: skip
        if value != 1 and same_bytes(change.apply(want), got):
            return change
    return None


def _offset(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    w, g, slack = _sampled(want, got)
    slack += (g - w).abs() * 2.0 ** -PRECISION[torch.float32]  # the addend was rounded too
    for value, plus in product(simplest(float((g - slack - w).max()), float((g + slack - w).min())), (_plus, _plus_once)):
        change = Change(
            "offset", {"value": value}, partial(plus, value=value),
            f"add {value:g} to the reference, compare every byte", f"with {-value:g} added instead it differs",
        )  # fmt: skip
        if value != 0 and same_bytes(change.apply(want), got):
            return change
    return None


def _rounded(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    some = 2 * FP8_BLOCK  # rows that rule most roundings out before the whole is rounded
    for through, apply in roundings():
        whole = isinstance(apply, Quantised) and apply.grain == "tensor"
        if (whole or same_bytes(apply(want[:some]), got[:some].contiguous())) and same_bytes(apply(want), got):
            return Change(
                "rounded", {"through": through}, apply, f"round the reference through {through}, compare every byte", "unrounded it differs"
            )
    return None


def roundings() -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Roundings that converters do, by name."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        yield str(dtype).removeprefix("torch."), partial(_through, dtype=dtype)
    for sign, name in ((-1.0, "w − 1"), (1.0, "w + 1")):
        yield (
            f"bfloat16 of {name}",
            partial(_there_and_back, by=sign),
        )
    for through, size in (("float8_e4m3fn", 448.0), ("int8", 127.0), ("int4", 7.0)):
        # a matrix of one block is named by the block, as FP8 checkpoints are
        for grain in (f"block of {FP8_BLOCK}", "tensor", "row", f"group of {FP8_BLOCK}", "group of 32"):
            yield f"{through}, one scale a {grain}", Quantised(through, size, grain)


@dataclass(frozen=True, slots=True)
class Quantised:
    """To a narrow dtype and back: scale = largest / `size` of each grain."""

    through: str
    size: float
    grain: str

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        if block.dim() < 2:
            return block
        wide, scale = block.float(), self.scales(block)
        narrow = wide / scale
        narrow = (
            narrow.to(torch.float8_e4m3fn).float() if self.through.startswith("float8") else narrow.round().clamp(-self.size - 1, self.size)
        )
        return (narrow * scale).to(block.dtype)

    def scales(self, block: torch.Tensor) -> torch.Tensor:
        """What each element is divided by; 1 where a grain is all zero."""
        wide = block.float()
        if self.grain == "tensor":
            scale = wide.abs().amax() / self.size
        elif self.grain == "row":
            scale = wide.abs().amax(-1, keepdim=True) / self.size
        else:
            width = int(self.grain.rpartition(" ")[2])
            scale = _grains(wide, width if self.grain.startswith("block") else 1, width) / self.size
        return torch.where(scale == 0, torch.ones_like(scale), scale)


def _grains(wide: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest magnitude of each grain of [.. r c], spread over it."""
    r, c = wide.shape[-2:]
    padded = torch.nn.functional.pad(wide.abs(), (0, -c % columns, 0, -r % rows))
    *more, high, wide_columns = padded.shape
    largest = padded.reshape(*more, high // rows, rows, wide_columns // columns, columns).amax((-3, -1))
    return largest.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :r, :c]


def fresh(want: torch.Tensor, got: torch.Tensor, std: float) -> Change | None:
    """A normal initialisation that never saw the reference.  There are no bytes to check, so this is statistics, and says so."""
    w, g, _ = _sampled(want, got)
    n = g.numel()
    # where the reference's own values look as fresh, rows of it in another place would too
    if n < FRESH or not _normal(g, std) or _normal(w, std) or float(w.std()) == 0:
        return None
    spread = float(g.std())
    tied = float(((g - g.mean()) * (w - w.mean())).mean() / (spread * w.std()))
    if abs(tied) > 5 / math.sqrt(n):
        return None
    experiment = f"statistics of {n} elements: normal, standard deviation {spread:.4g} ({std:g} is what an initialisation gives), correlation with the reference {tied:+.3f}"
    return Change(
        "init",
        {"distribution": "normal", "std": std},
        lambda block: block,
        experiment,
        f"the reference's own standard deviation is {float(w.std()):.4g}",
    )


def _normal(values: torch.Tensor, std: float) -> bool:
    """Whether mean, spread and kurtosis are those of a normal distribution around 0."""
    n, spread = values.numel(), float(values.std())
    if not bool(values.isfinite().all()) or spread == 0:
        return False
    kurtosis = float(((values - values.mean()) ** 4).mean() / spread**4)
    near = abs(spread / std - 1) < 5 / math.sqrt(2 * n) + 2**-8
    return near and abs(float(values.mean())) <= 5 * spread / math.sqrt(n) and abs(kurtosis - 3) <= 5 * math.sqrt(24 / n)


def _times(block: torch.Tensor, value: float) -> torch.Tensor:
    return (block.double() * value).to(block.dtype)


def _times_once(block: torch.Tensor, value: float) -> torch.Tensor:
    """As torch multiplies: by the factor in float32, which falls on the other side of many ties of bfloat16."""
    return block * value


def _plus(block: torch.Tensor, value: float) -> torch.Tensor:
    return (block.double() + value).to(block.dtype)


def _plus_once(block: torch.Tensor, value: float) -> torch.Tensor:
    """As torch adds: the addend in the dtype of the sum."""
    return block + value


def _through(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return block.to(dtype).to(block.dtype)


def _there_and_back(block: torch.Tensor, by: float) -> torch.Tensor:
    """w → w + by → w, each step in bfloat16: a norm whose gamma is centred and put back."""
    return ((block.float() + by).to(torch.bfloat16).float() - by).to(torch.bfloat16).to(block.dtype)


def simplest(low: float, high: float) -> list[float]:
    """Numbers between two bounds, the ones a person would write first; none when there is nothing between them."""
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        return []
    found: list[float] = []
    middle = (low + high) / 2
    for digits in range(13):
        near = round(middle, digits)
        if low <= near <= high and near not in found:
            found.append(near)
    if low > 0 and 2.0 ** round(math.log2(middle)) >= low and 2.0 ** round(math.log2(middle)) <= high:
        found.insert(0, 2.0 ** round(math.log2(middle)))
    halves = [near for n in range(1, 13) if low <= (near := round(middle * 2**n) / 2**n) <= high and near not in found]
    short = [one for one in found if one == round(one, 2) or math.log2(abs(one) or 1) % 1 == 0]
    return [*short, *halves[:4], *(one for one in found[:8] if one not in short), middle]


def _sampled(want: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements of both, and half a unit in the last place of the candidate's (an upper bound of it)."""
    step = max(1, want.numel() // SAMPLE)
    w, g = want.flatten()[::step].double(), got.flatten()[::step].double()
    slack = g.abs() * 2.0 ** -PRECISION[got.dtype] + 2.0**-130
    return w, g, slack


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
