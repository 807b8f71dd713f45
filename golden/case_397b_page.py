"""The words of docs/case-397b.md, around what `case_397b.py` ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def page_of(
    said: Mapping[str, str], pages: Mapping[str, Mapping[str, Any]], commands: Mapping[str, str], numbers: Mapping[str, Any]
) -> str:
    """The whole page.  said: screens by step · pages: their reports · commands: how each was run"""

    def shown(name: str, *, of: str = "") -> str:
        """A command and its screen."""
        return f"```\n$ {commands[name]}\n{of or said[name]}\n```"

    def lines(name: str, *starts: str) -> str:
        """Only the parts of a screen that begin so, with what is wrapped under them."""
        kept, inside = [], False
        for line in said[name].splitlines():
            if line and not line.startswith(" " * 4):
                inside = line.lstrip().startswith(starts)
            elif not line:
                inside = False
            if inside:
                kept.append(line)
        return "\n".join(kept)

    audits = [
        ("ours-ep1", "ours, EP 1"), ("ours-ep4", "ours, EP 4"), ("ours-faulty", "ours, EP 4, with E01 planted"),
        ("slime-ep1", "slime 0.2.4, EP 1"), ("slime-ep4", "slime 0.2.4, PP 2 and EP 4"), ("slime-fixed", "slime 43c5174f0 (the fix), PP 2 and EP 4"),
        ("export", "slime 0.2.4's export of the EP 4 checkpoint"), ("repaired", "the EP 4 checkpoint, repaired"),
    ]  # fmt: skip
    right, sums = numbers["right"], numbers["sums"]
    garbled = [(one["prompt"], one["reference"], one["candidate"], numbers["mended"][one["prompt"]]) for one in numbers["garbled"]]
    first = pages["slime-ep4"]["first"]["relation"]["detail"]
    big = pages["geometry"]["first"]["relation"]["detail"]
    away = next(probe for probe in pages["ladder"]["stages"][4]["probes"] if probe.startswith("mean distance"))
    return f"""# A case: rollouts of Qwen3.5-397B-A17B are garbage, those of 35B-A3B are fine

Written by `make case-397b` (golden/case_397b.py), which runs every step and fails if one comes out otherwise. All numbers and screens
below are of that run; seconds are left out. The question is THUDM/slime#1852: the 397B model converted with slime 0.2.4 and mbridge,
trained without an error, and every rollout garbled, while 35B works with the same scripts and the original checkpoint serves well.

**Short answer.** The conversion, very likely: slime before 0.3.0 takes each routed expert by its number *within its EP rank*, so with
EP 16 every rank holds the first rank's experts, {big["wrong"]} of {big["of"]} are wrong, and EP 1 (how 35B was converted) hides it. Nobody
confirmed it in that thread; one command on your own files does, reads nothing but them and needs no GPU:

```
bisect-tool audit --reference Qwen3.5-397B-A17B --candidate YOUR_TORCH_DIST
```

If only an exported directory is left, `--export YOUR_EXPORT` instead of `--candidate` shows the same. If it says `e mod 32`, convert
again with slime 0.3.0 or later, or let `--repair NEW_DIR` write the checkpoint as it should be. If it agrees, the conversion is cleared,
and the rest of this page says how to go on.

## What is run here

The tiny model of this repository's tests: Qwen3.5-MoE with 8 layers (every fourth with full attention), {first["of"]} experts, trained to add
two numbers. Its checkpoints were written twice: by `bisect-tool convert`, and by slime 0.2.4's own converter, unchanged
(tests/data/cases; Transformer Engine and the CUDA calls were stubbed, no number was). EP 1 stands for how 35B was converted, EP 4 for
397B. The fault does not depend on size; the geometry with 512 experts is at the end.

## 1. Is it the launch script?

The reporter's flags, as posted, against the 397B config.json. Nothing of a script is executed:

{shown("launch")}

So the suspicions of the thread about flags are cleared, each with its reason. The conversion script says one thing more, in a note:

{shown("convert-script", of=lines("convert-script", "note this converts", "note EP", "note PP", "AGREES"))}

## 2. Is it the conversion?

Every tensor against what the weight table makes of the reference, byte by byte:

{shown("slime-ep4")}

The same for all of them:

| checkpoint | verdict | first fault | minor |
|---|---|---|---|
{chr(10).join(_row(pages[name], words) for name, words in audits)}

That slime keeps `A_log` and `dt_bias` as bfloat16 is true of every checkpoint it writes, the good ones too: a loss of precision,
no cause of garbage. The command for ours:

```
{commands["convert-ep4"]}
{commands["plant"]}
{commands["ours-faulty"]}
```

## 3. What the rollouts show

{sums} sums, answered greedily by megatron-core from each checkpoint, in fp32:

| weights | right answers |
|---|---|
| the reference (transformers) | {right["reference"]} of {sums} |
| slime 0.2.4, EP 1 | {right["slime-0.2.4-ep1"]} of {sums} |
| slime 0.2.4, EP 4 | {right["slime-0.2.4-ep4"]} of {sums} |
| repaired | {right["repaired"]} of {sums} |

| asked | reference | EP 4 checkpoint | repaired |
|---|---|---|---|
{chr(10).join(f"| `{a}` | `{b}` | `{c}` | `{d}` |" for a, b, c, d in garbled)}

With three quarters of its experts wrong the small model degrades, because router, shared expert and attention are right; with
{big["wrong"]} of {big["of"]} wrong there is little left.

An engine's own words, from an engine that serves the export (here transformers samples {numbers["responses"]} responses from it: no
engine can be installed where this runs). Rollouts alone say that it is wrong and from which token on, and not whose fault it is, so the
class stays open and the report names the piece that decides:

{shown("rollout", of=lines("rollout", "engine ", "FAULT", "next"))}

## 4. All of it at once

{shown("ladder", of=lines("ladder", "inputs", "config", "weights", "forward", "engine ", "FAULT", "proof", "control", "next", "cleared", "DIFFERS"))}

One fault, found in the bytes and proven by a graft. The engine says what the candidate says ({away.removeprefix("mean distance in nats a token: ")}), so it is cleared: what it
computes with these weights is right. Without `--all-stages` the run stops at the weights stage.

## 5. Repair, and see it right

```
{commands["repair"]}
{commands["mended"]}
```

{shown("mended", of=lines("mended", "inputs", "config", "weights", "forward", "cleared", "AGREES"))}

## 6. 512 experts

One layer in the real geometry (hidden 4096, 512 experts of width 1024, converted at EP 16), {numbers["bytes"] / 1e9:.1f} GB on both sides as sparse files:

{shown("geometry", of=lines("geometry", "weights", "FAULT", "proof", "control", "DIFFERS"))}

`make drill-397b` does it on the whole model, 60 layers and 805 GB a side, with a clean conversion as the control; it was not run for
this page.

## If the audit agrees on yours

| what you have | command | what it tells |
|---|---|---|
| a dump of rollouts (`--save-debug-rollout-data`) | `bisect-tool rollout --reference HF --rollout DUMP` | tokens, template, log-prob definition, first bad token, which engine, which sync |
| the trainer's dump too (`--save-debug-train-data`) | add `--train DUMP` | trainer against engine: whose side is wrong |
| a server of the original checkpoint | add `--server URL` | engine decode against its own prefill: an engine that disagrees with itself clears the conversion |
| a listing of what the engine holds | add `--hashes FILE` | a sync that goes wrong, tensor by tensor |
| an engine's activations | add `--rollout-recording DIR` | layer and module of an engine's drift |
"""


def _row(page: Mapping[str, Any], words: str) -> str:
    first, fault = page["first"], ""
    if first is not None:
        detail = first["relation"]["detail"]
        fault = f"{', '.join(first['modules'])} ({', '.join(first['parts'])}): {detail['map']}, {detail['wrong']} of {detail['of']} wrong"
    minor = "; ".join(
        f"{', '.join(one['modules'])} {', '.join(one['parts'])}: {one['relation']['kind']}".replace(" : ", ": ") for one in page["minor"]
    )
    return f"| {words} | {page['verdict']} | {fault} | {minor} |"
