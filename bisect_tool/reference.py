"""The reference as the driver sees it: its Recording, its probes of the experts, and its own noise.

The allowance at a site comes from the reference itself: the same function, on the same inputs, evaluated another way.  Four
re-evaluations are made, each layer given the same inputs as the first time:

    another order   half the chunk of the delta rule, experts in one batched product
    alone           every prompt in a batch of its own, so other shapes and other blocking
    permuted        the hidden dimension in another order, weights and all: an exact symmetry
    half an ulp     every weight and every grafted input moved by up to half a unit in its last place (seeded)

The floor of a site is the largest relative rms of the four, and at least half a unit in the last place; the allowance is MARGIN
times the floor.  Rows (tokens) and columns (channels) have allowances of their own (`noise.py`).  The margin covers that the
candidate adds its own order of sums to ours; `make bench` prints how much of it clean runs use.

A choice has no noise.  What lies behind one (the routed experts' sum, the layer's output) is compared on tokens whose experts
were chosen alike; probabilities by the rule on logits moved by half a unit in the last place.
"""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from bisect_hooks.errors import UsageError, by_kind
from bisect_hooks.family import CheckpointLayout, Dimensions, Family
from bisect_hooks.hf import VERSION, Reference
from bisect_hooks.site import parse_site
from bisect_hooks.tap import split_key

from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.judge import Tolerance
from bisect_tool.measure import Sums, measure
from bisect_tool.noise import MARGIN, Noise, estimate
from bisect_tool.prompts import FORWARD_TOKENS, Batch
from bisect_tool.recording import Provenance, Recording, by_group, writing
from bisect_tool.rounding import Rounding
from bisect_tool.spilled import Spilled

SEED = 20260423
PROBE_ROWS = 8
SOURCE = f"{MARGIN:.0f} x the reference's own noise (four re-evaluations)"
# a golden directory's Recording
RECORDING = "recording"
BEHIND_ROUTING = ("experts.combine", "output")


def base_grafts(dims: Dimensions) -> list[str]:
    """Where each layer is cut loose: its input, the output of its mixer, and what leaves the last layer."""
    mixers = [f"layers.{n}.{dims.kinds[n]}.out_proj" for n in range(dims.layers)]
    return [*(f"layers.{n}.input" for n in range(dims.layers)), *mixers, f"layers.{dims.layers - 1}.output", "final_norm"]


def load_reference(
    directory: HuggingFaceDirectory,
    family: Family,
    layout: CheckpointLayout,
    dtype: torch.dtype,
    device: str,
    stored: Mapping[str, torch.dtype] | None = None,
) -> tuple[Reference, list[str]]:
    """The model, run through the rounding of the table's lossy rows and of the candidate's dtypes; and a note for each, with its size.

    stored  dtypes of the candidate's tensors by name
    """
    dims = family.reference_dimensions(directory.config)
    reference = Reference(directory.path, family, dims, dtype, torch.device(device))
    notes: list[str] = []
    for rounded in Rounding.of(directory, family, layout, stored).tensors(notes):
        reference.put(rounded)
    return reference, notes


def record_reference(
    reference: Reference,
    batch: Batch,
    out: Path,
    *,
    model: str,
    layout: CheckpointLayout,
    noise: bool = True,
    rounded: Mapping[str, str] = MappingProxyType({}),
) -> Recording:
    """Runs the reference freely, writes everything it said, and measures its own noise at every key.

    rounded  tensors that a candidate stores in another dtype, and which; goes into the provenance

    What is held at once is what a few prompts say; what is said of the others waits on disk.
    """
    with tempfile.TemporaryDirectory(prefix="bisect-said-") as folder, writing(out) as writer:
        said = Spilled(Path(folder) / "said")
        for _, part in batch.parts(FORWARD_TOKENS):
            said.add(_said(reference, part))
        probes = _probe_all(reference, said)
        floor, free_floor, noises = _noise(reference, batch, said, probes, Path(folder)) if noise else ({}, {}, {})
        everything = ChainMap(probes, said)  # type: ignore[arg-type]
        for group, keys in by_group([*said, *probes]).items():
            writer.add(group, {key: everything[key].cpu() for key in keys})
        if noises:
            writer.add_noise(noises)
        writer.close(
            Provenance(
                side="reference",
                family=reference.family.name,
                model=model,
                dtype=str(reference.dtype).removeprefix("torch."),
                rows=batch.rows,
                layout=layout,
                versions={"torch": torch.__version__, "transformers": VERSION},
                device=str(reference.device),
                floor=floor,
                free_floor=free_floor,
                worst={key: found.worst for key, found in noises.items()},
                rounded=dict(rounded),
            )
        )
    return Recording(out)


@dataclass(frozen=True)
class Recorded:
    """A reference that has spoken: its Recording with its noise, what there is to say about it, and the model, loaded when asked for."""

    load: Callable[[], Reference] = field(repr=False)
    recording: Recording
    notes: tuple[str, ...]
    folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def reference(self) -> Reference:
        return self.load()


def recorded_reference(
    directory: HuggingFaceDirectory,
    family: Family,
    layout: CheckpointLayout,
    dtype: torch.dtype,
    device: str,
    batch: Batch,
    stored: Mapping[str, torch.dtype] | None = None,
) -> Recorded:
    """The reference recorded once a process: like ranks, it is kept for whoever judges several candidates against it."""
    files = sorted({stored.pieces[0].file for stored in directory.stored.values()} | {directory.path / "config.json"})
    stamp = tuple((str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    rounding = Rounding.of(directory, family, layout, stored)
    key = (stamp, layout, dtype, device, batch, frozenset(rounding.dtypes.items()))
    if key not in _RECORDED:
        _RECORDED.clear()
        reference, notes = load_reference(directory, family, layout, dtype, device, stored)
        folder = tempfile.TemporaryDirectory(prefix="bisect-reference-")
        out = Path(folder.name) / "recording"
        recording = record_reference(reference, batch, out, model=str(directory.path), layout=layout, rounded=rounding.shown)
        _RECORDED[key] = Recorded(lambda: reference, recording, tuple(notes), folder)
    return _RECORDED[key]


def golden_recording(golden: Path) -> Recording:
    """The Recording of a golden directory.  Raises UsageError when there is none, or none with measured noise."""
    recording = Recording(golden / RECORDING if (golden / RECORDING).is_dir() else golden)
    if not recording.provenance.floor:
        raise UsageError(
            f"{recording.path} has no measured noise, so nothing says what is allowed",
            hint="record the reference again: bisect-tool record --side reference",
        )
    return recording


def golden_reference(
    golden: Path,
    directory: HuggingFaceDirectory,
    family: Family,
    layout: CheckpointLayout,
    dtype: torch.dtype,
    device: str,
    batch: Batch,
    stored: Mapping[str, torch.dtype] | None = None,
) -> Recorded:
    """What a golden directory keeps of the reference, in place of running it.

    Raises UsageError where it is of another family or dtype, of other token ids, or of a checkpoint that rounds otherwise.
    """
    recording = golden_recording(golden)
    come, asked = recording.provenance, str(dtype).removeprefix("torch.")
    rounding = Rounding.of(directory, family, layout, stored)
    rounds = any(rule.op.lossy for rule in rounding.rules)
    otherwise = [name for name, _ in sorted(come.rounded.items() ^ rounding.shown.items())]
    wrong = [
        *([f"of {come.family}, the reference is a {family.name}"] if come.family != family.name else []),
        *([f"in {come.dtype}, --dtype asks for {asked}"] if come.dtype != asked else []),
        *(["of rows padded on the right"] if batch.left else []),
        *([f"of {len(come.rows)} other prompts ({recording.batch.tokens} tokens)"] if come.rows != batch.rows else []),
        *([f"for {come.layout} checkpoints, and the {layout} layout rounds some weights"] if come.layout != layout and rounds else []),
        *(
            [f"of a reference that was not rounded as this candidate's dtypes round it ({', '.join(by_kind(otherwise)[:2])})"]
            if otherwise
            else []
        ),
    ]
    if wrong:
        raise UsageError(
            f"the recording in {recording.path} is {'; '.join(wrong)}", hint="leave --golden out, or record the reference again"
        )
    notes = (f"the reference was not run: {recording.path} holds what it said",)
    return Recorded(lambda: load_reference(directory, family, layout, dtype, device, stored)[0], recording, notes)


_RECORDED: dict[object, Recorded] = {}


def probe_inputs(recording: Recording, dims: Dimensions) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What every expert of a layer is probed with: rows of the reference's MoE input, and its own activations for fc2."""
    inputs = {}
    for layer in range(dims.layers):
        if dims.moe[layer]:
            inputs[layer] = (recording[f"layers.{layer}.experts.fc1:rows"], recording[f"layers.{layer}.experts.fc2:rows"])
    return inputs


def tolerance_of(recording: Recording, key: str, *, free: bool = False) -> Tolerance:
    """The allowance at a key; what is only handed on (dispatch) or chosen (top-k) has to be exact."""
    if ".dispatch:" in key or key.endswith(".topk"):
        return Tolerance(0.0, "exact: judged by the candidate's own routing")
    floor = (recording.provenance.free_floor if free else recording.provenance.floor).get(key, 0.0)
    return Tolerance(MARGIN * floor, SOURCE, None if free else recording.noise(key))


def routed_alike(key: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """[t] tokens whose experts both chose alike, for a key behind the choice; None where every token counts."""
    site = parse_site(split_key(key)[0])
    topk = f"layers.{site.layer}.router.topk"
    behind = (f"{site.module}.{site.part}" if site.part else site.module) in BEHIND_ROUTING
    if not behind or topk not in one or topk not in other:
        return None
    return (one[topk].float() == other[topk].float()).all(-1)


def _said(
    reference: Reference, batch: Batch, grafts: Mapping[str, torch.Tensor] | None = None, most: int | None = None
) -> dict[str, torch.Tensor]:
    """Every key [tokens f], from forwards of a few prompts each, so that memory goes with tokens and not with padding."""
    parts: dict[str, list[torch.Tensor]] = {}
    for start, part in batch.parts(most or FORWARD_TOKENS):
        ids, mask = part.ids(), part.mask()
        put = {key: part.unpack(value[start : start + part.tokens], *ids.shape) for key, value in (grafts or {}).items()}
        for key, value in reference.record(ids, mask, put).items():
            parts.setdefault(key, []).append(part.pack(value))
    return {key: values[0] if len(values) == 1 else torch.cat(values) for key, values in parts.items()}


def _probe_all(reference: Reference, said: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    probes: dict[str, torch.Tensor] = {}
    for layer in range(reference.dims.layers):
        if reference.dims.moe[layer]:
            tokens = said[f"layers.{layer}.pre_mlp_norm"]
            step = max(1, len(tokens) // PROBE_ROWS)
            rows = tokens[::step][:PROBE_ROWS].clone()  # of few tokens this is all of them, and files hold no tensor twice
            first, inner, second = reference.probe_experts(layer, rows)
            probes |= {
                f"layers.{layer}.experts.fc1:rows": rows,
                f"layers.{layer}.experts.fc2:rows": inner,
                f"layers.{layer}.experts.fc1": first,
                f"layers.{layer}.experts.fc2": second,
            }
    return probes


Floors = dict[str, float]
Evaluate = Callable[[Batch, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


def _noise(
    reference: Reference, batch: Batch, said: Spilled, probes: Mapping[str, torch.Tensor], folder: Path
) -> tuple[Floors, Floors, dict[str, Noise]]:
    least = torch.finfo(reference.dtype).eps / 2
    floor, free = dict.fromkeys(said, least), dict.fromkeys(said, least)
    deltas: list[Spilled] = []
    parts = [part for _, part in batch.parts(FORWARD_TOKENS)]
    cut_loose = base_grafts(reference.dims)

    def raise_to(levels: Floors, evaluate: Evaluate, grafted: bool) -> None:
        """Evaluates another way, a part of the batch at a time; of grafted evaluations the differences are kept."""
        sums: dict[str, Sums] = {}
        spilled = Spilled(folder / f"deltas-{len(deltas)}") if grafted else None
        for number, part in enumerate(parts):
            before = said.part(number, reference.device)
            again = evaluate(part, {key: before[key] for key in cut_loose} if grafted else {})
            # a choice has no noise: it is judged by the rule on the candidate's own logits
            compared = {key: _kept(key, before, again) for key in again if not _is_choice(key)}
            for key, keep in compared.items():
                if bool(keep.any()):
                    sums.setdefault(key, Sums()).add(before[key][keep], again[key][keep])
            if spilled is not None:
                # noise needs few digits
                spilled.add(
                    {
                        key: (again[key].float() - before[key].float()).bfloat16().masked_fill(~keep[:, None], torch.nan)
                        for key, keep in compared.items()
                    }
                )
        for key, one in sums.items():
            levels[key] = max(levels[key], one.difference().relative_rms)
        if spilled is not None:
            deltas.append(spilled)

    def once(part: Batch, grafts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _said(reference, part, grafts)

    with reference.another_order():
        raise_to(floor, once, grafted=True)
        raise_to(free, once, grafted=False)
    raise_to(floor, partial(_said, reference, most=1), grafted=True)  # every prompt in a batch of its own
    with reference.hidden_permuted(SEED):
        raise_to(floor, once, grafted=True)
    ruled: dict[str, list[torch.Tensor]] = {}
    with reference.half_an_ulp_off(SEED) as nudge:

        def nudged(part: Batch, grafts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return _said(reference, part, {key: nudge(value) for key, value in grafts.items()})

        raise_to(floor, nudged, grafted=True)
        raise_to(free, once, grafted=False)
        for key in (key for key in probes if ":" not in key):
            floor[key] = least
        for layer in range(reference.dims.layers):
            if reference.dims.moe[layer]:
                first, _, second = reference.probe_experts(layer, nudge(probes[f"layers.{layer}.experts.fc1:rows"]))
                for key, again in ((f"layers.{layer}.experts.fc1", first), (f"layers.{layer}.experts.fc2", second)):
                    # each expert is judged by itself, so the floor is the worst expert's
                    floor[key] = max(floor[key], *(measure(a, b).relative_rms for a, b in zip(probes[key], again, strict=True)))
        for key in (key for key in said if key.endswith(".router.probs")):
            floor[key], ruled[key] = _rule_noise(reference, key, said, nudge, least)
    noises = {key: estimate(said[key], ruled.get(key) or [one[key] for one in deltas], least) for key in deltas[0]}
    return floor, free, noises


def _kept(key: str, before: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[t] tokens whose values at a key can be compared."""
    alike = routed_alike(key, before, again)
    return torch.ones(len(before[key]), dtype=torch.bool, device=before[key].device) if alike is None else alike


def _rule_noise(
    reference: Reference, key: str, said: Mapping[str, torch.Tensor], nudge: Callable[[torch.Tensor], torch.Tensor], least: float
) -> tuple[float, list[torch.Tensor]]:
    """Of probabilities: the rule on its own logits and on moved ones, against what the reference said, where the choice stayed."""
    prefix = key.removesuffix(".probs")
    found, level = [], least
    for logits in (said[f"{prefix}.logits"].float(), nudge(said[f"{prefix}.logits"]).float()):
        routing = reference.family.route(logits, reference.dims, said.get(f"{prefix}.expert_bias"))
        keep = (routing.chosen == said[f"{prefix}.topk"].float()).all(-1)
        if bool(keep.any()):
            level = max(level, measure(said[key][keep].float(), routing.probs[keep]).relative_rms)
        found.append((routing.probs - said[key].float()).bfloat16().masked_fill(~keep[:, None], torch.nan))
    return level, found


def _is_choice(key: str) -> bool:
    site = parse_site(split_key(key)[0])
    return site.module == "tokens" or site.part == "topk"


def answers_of(logits_of: Any, rows: list[list[int]], *, end: int | None, limit: int) -> list[list[int]]:
    """Greedy continuations of each row.  `logits_of` maps rows of ids to the logits after each row's last token."""
    said: list[list[int]] = [[] for _ in rows]
    done = [False] * len(rows)
    for _ in range(limit):
        logits = logits_of([row + one for row, one in zip(rows, said, strict=True)])
        for i, token in enumerate(logits.argmax(-1).tolist()):
            if not done[i]:
                said[i].append(token)
                done[i] = token == end
        if all(done):
            break
    return said
