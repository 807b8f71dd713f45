"""Small faults and several at once, found by activations alone, the whole verdict; and what is no fault and must not be called one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bisect_hooks.parallel import Parallel
from cases import FORWARD, FULL, Verdict, fault
from safetensors.torch import load_file, save_file
from workshop import REFERENCE, Workshop, judge, verdict_of

from bisect_tool.__main__ import run
from bisect_tool.conversion import convert

# `make wide` runs these: with them `make test` is near CI's 15 minutes on a slow day
pytestmark = [pytest.mark.ranks, pytest.mark.wide]
LOUD = 17

# one line each, run in the built candidate's memory: the files are right, so the class is the definition's
EXPERT = "layers[5].mlp.experts.local_experts[9].linear_fc2.weight.mul_(1.02)"
HEAD = "layers[3].self_attention.linear_qkv.weight[32:64].mul_(1.02)"
CHANNEL = "layers[2].pre_mlp_layernorm.weight[40].mul_(0.99)"
SCALE = "layers[6].self_attention.linear_attn.out_proj.weight.mul_(1.02)"
SWAPPED = (
    "layers[1].self_attention.linear_attn.norm.weight.copy_(layers[1].self_attention.linear_attn.norm.weight[[0, 2, 1, *range(3, 24)]])"
)
BOUNDARY = "layers[4].pre_mlp_layernorm.register_forward_hook(lambda module, args, output: output * scale_of(output, 64, 1.02))"
ROUTER = "layers[2].mlp.router.weight[3].mul_(1.05)"
FIRST = "layers[2].mlp.experts.local_experts[11].linear_fc1.weight[7].mul_(0.9)"
FINAL = "model.decoder.final_layernorm.weight[5].add_(0.01)"
NOT_A_NUMBER = "layers[3].self_attention.linear_proj.weight[4].fill_(float('nan'))"
NOT_A_NUMBER_BEFORE_THE_ROUTER = "layers[2].pre_mlp_layernorm.weight[90].fill_(float('nan'))"
# only one tensor parallel rank, so that one rank cures it
SHARD = "layers[7].mlp.shared_experts.linear_fc1.weight[1].mul_(1.5 if rank == 1 else 1.0)"


def patch_of(folder: Path, *lines: str) -> Path:
    """A --candidate-patch of these lines; an edit of a local expert counts experts as the whole model does."""
    out = folder / "patch.py"
    out.write_text(
        "import torch\n"
        "from megatron.core import parallel_state\n\n\n"
        "def scale_of(tensor, position, factor):\n"
        "    scale = torch.ones(len(tensor), 1, 1)\n"
        "    scale[position] = factor\n"
        "    return scale\n\n\n"
        "def patch(model, parallel):\n"
        "    layers, rank = model.decoder.layers, parallel_state.get_tensor_model_parallel_rank()\n"
        + "".join(f"    {line}\n" for line in lines)
    )
    return out


def judged(candidate: Path, folder: Path, under: str, *lines: str, more: tuple[str, ...] = FORWARD, **sides: Path) -> dict[str, Any]:
    patch = ("--candidate-patch", str(patch_of(folder, *lines))) if lines else ()
    code, page = judge(candidate, folder / "out", under, *more, *patch, **sides)
    assert code == {"differs": 1, "agrees": 0}[page["verdict"]]
    assert page["minor"] == []
    return page


def found(page: dict[str, Any]) -> list[Verdict]:
    return [verdict_of(one) for one in page["faults"]]


def made(layers: list[int], module: str, *parts: str, cls: str = "model-definition", **shard: list[int]) -> Verdict:
    return fault(cls, layers, module, list(parts), None, "run", None, **shard)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (EXPERT, made([5], "experts", "fc2")),
        (HEAD, made([3], "attention", "qkv")),
        (CHANNEL, made([2], "pre_mlp_norm")),
        (SCALE, made([6], "linear_attention", "out_proj")),
        (SWAPPED, made([1], "linear_attention", "gated_norm")),
        (BOUNDARY, made([4], "pre_mlp_norm")),
        (NOT_A_NUMBER, made([3], "attention", "out_proj")),
    ],
    ids=["one expert", "one head", "one channel of a norm", "a scale of 1.02", "two channels swapped", "one token at a boundary", "NaN"],
)
def test_a_small_fault_is_named_and_nothing_else(line: str, expected: Verdict, workshop: Workshop, tmp_path: Path) -> None:
    page = judged(workshop.good("slime", "one"), tmp_path, "one", line)
    assert found(page) == [expected]
    if line == BOUNDARY:
        assert page["first"]["shape"]["text"] == "only at token 64"


def test_a_fault_that_the_prompts_do_not_show_is_found_and_said_to_be_hidden(workshop: Workshop, tmp_path: Path) -> None:
    """One token goes to four experts; expert 9 of layer 5 is none of them, and is probed all the same."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [5]}) + "\n")
    page = judged(workshop.good("slime", "one"), tmp_path, "one", EXPERT, prompts=prompts)
    assert found(page) == [made([5], "experts", "fc2")]
    assert page["first"]["shows_at"] is None
    assert any("layers.5.experts.fc2: free-running, nothing behind it leaves" in note for note in page["stages"][3]["notes"])


def test_what_a_later_run_compares_is_not_said_to_be_left_out(workshop: Workshop, tmp_path: Path) -> None:
    """What the router makes of NaN can't be judged by any rule; once the norm before it is cured, it can."""
    page = judged(workshop.good("slime", "one"), tmp_path, "one", NOT_A_NUMBER_BEFORE_THE_ROUTER)
    assert made([2], "pre_mlp_norm") in found(page)
    forward = page["stages"][3]
    assert any("grafted run 2" in probe for probe in forward["probes"])
    assert not [note for note in forward["notes"] if note.startswith("not compared")]


@pytest.mark.parametrize("name", ["P01", "P03"])
def test_a_wrong_rotation_grows_with_position(name: str, workshop: Workshop, tmp_path: Path) -> None:
    page = judged(workshop.faulty("slime", "one", name), tmp_path, "one")
    assert found(page) == [fault("model-definition", FULL, "attention", ["rope"], "config", "run")]
    assert page["first"]["shape"]["text"] == "grows with position, zero at position 0"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((HEAD, CHANNEL), [made([2], "pre_mlp_norm"), made([3], "attention", "qkv")]),
        # with its routing given, an expert is judged whatever the router does
        ((ROUTER, FIRST), [made([2], "router", "logits"), made([2], "experts", "fc1")]),
        ((SWAPPED, BOUNDARY, EXPERT), [made([1], "linear_attention", "gated_norm"), made([4], "pre_mlp_norm"), made([5], "experts", "fc2")]),
        (
            (CHANNEL, HEAD, EXPERT, SCALE, FINAL),
            [
                made([2], "pre_mlp_norm"), made([3], "attention", "qkv"), made([5], "experts", "fc2"), made([6], "linear_attention", "out_proj"),
                made([], "final_norm"),
            ],
        ),
    ],
    ids=["two", "a router and an expert", "three", "five"],
)  # fmt: skip
def test_faults_made_at_once_are_all_named_and_none_is_invented(
    lines: tuple[str, ...], expected: list[Verdict], workshop: Workshop, tmp_path: Path
) -> None:
    assert found(judged(workshop.good("slime", "one"), tmp_path, "one", *lines)) == expected


def test_faults_of_different_shards_are_told_apart(workshop: Workshop, tmp_path: Path) -> None:
    """Expert 9 is the second of EP rank 1; the shared expert's rows are wrong on TP rank 1 alone."""
    expert = "if parallel_state.get_expert_model_parallel_rank() == 1 or parallel.ep == 1: layers[5].mlp.experts.local_experts[9 % (16 // parallel.ep)].linear_fc2.weight.mul_(1.02)"
    page = judged(workshop.good("slime", "one"), tmp_path, "tp2ep2", CHANNEL, expert, SHARD)
    assert found(page) == [
        made([2], "pre_mlp_norm", tp=[0, 1]),
        made([5], "experts", "fc2", ep=[1]),
        made([7], "shared_expert", "fc1", cls="parallel", tp=[1]),
    ]
    assert page["faults"][2]["axes"] == ["tp"]


# -- what is no fault --------------------------------------------------------------------------------------------------------------

CASCADE = '''
def cascade(module, args, kwargs, output):
    """Keys in two parts, merged by their log-sum-exp."""
    query, key, value, mask = (*args, kwargs.get("attention_mask"))[:4]
    times = query.shape[2] // key.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3).float() for t in (query, key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)))
    scores = (q @ k.transpose(-1, -2) * module.softmax_scale).masked_fill(mask, float("-inf"))
    half, parts, sums = max(1, k.shape[2] // 2), [], []
    for keys in (slice(0, half), slice(half, None)):
        sums.append(scores[..., keys].logsumexp(-1, keepdim=True))
        parts.append((scores[..., keys] - sums[-1]).exp().nan_to_num(0) @ v[..., keys, :])
    weights = torch.cat(sums, -1).softmax(-1)
    merged = parts[0] * weights[..., :1] + parts[1] * weights[..., 1:]
    return merged.permute(2, 0, 1, 3).flatten(2).to(output.dtype)
'''
CONTROLS = {
    "Z01-rounding-in-every-op": ("bf16", ""),
    "Z03-weighted-after-the-down-projection": (
        "bf16",
        "for layer in layers:\n"
        "        for expert in layer.mlp.experts.local_experts:\n"
        "            expert.forward = lambda x, p, right=expert.forward: (right(x, torch.ones_like(p))[0] * p[:, None].to(x.dtype), None)",
    ),
    "Z04-cascade-attention": (
        "bf16",
        f"exec('''{CASCADE.replace(chr(34) * 3, chr(34))}''', globals())\n"
        "    for layer in layers:\n"
        "        if hasattr(layer.self_attention, 'core_attention'):\n"
        "            layer.self_attention.core_attention.register_forward_hook(cascade, with_kwargs=True)",
    ),
    "Z05-ties-of-the-router": (
        "bf16",
        "torch.manual_seed(7)\n"
        "    for layer in layers:\n"
        "        layer.mlp.router.gating = lambda x, right=layer.mlp.router.gating: right(x) + 1e-3 * torch.randn(*x.shape[:2], 16)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["slime", "native"])
@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_no_fault_is_said_to_be_normal(name: str, layout: str, workshop: Workshop, tmp_path: Path) -> None:
    dtype, line = CONTROLS[name]
    page = judged(workshop.good(layout, "one"), tmp_path, "one", *filter(None, [line]), more=(*FORWARD, "--dtype", dtype))
    assert (page["verdict"], found(page)) == ("agrees", [])
    notes = page["stages"][3]["notes"]
    assert any("is this normal? yes" in note for note in notes)


def test_flips_of_the_router_are_counted_with_their_margins(workshop: Workshop, tmp_path: Path) -> None:
    """Noise ten times as large as rounding's, so that some choices flip: each follows from the candidate's own logits."""
    line = CONTROLS["Z05-ties-of-the-router"][1].replace("1e-3", "1e-2")
    page = judged(workshop.good("slime", "one"), tmp_path, "one", line, more=(*FORWARD, "--dtype", "bf16"))
    assert any(note.startswith("routing: ") and "choices of experts are not the reference's" in note for note in page["stages"][3]["notes"])
    assert {one["module"] for one in page["faults"]} <= {"router"} and all(one["part"] == "logits" for one in page["faults"])


def test_other_padding_is_no_fault_z02(tmp_path: Path) -> None:
    """The same tokens beside a longer prompt, so padded to another length."""
    rows = [[5, 17, 101, 9, 44], list(range(3, 60)), list(range(3, 160))]
    for name, prompts in (("short", rows[:2]), ("long", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in prompts))
        run(
            [
                "record",
                "--side",
                "reference",
                "--prompts",
                str(tmp_path / f"{name}.jsonl"),
                "--reference",
                str(REFERENCE),
                "--out",
                str(tmp_path / name),
            ]
        )
    assert run(["compare", str(tmp_path / "short"), str(tmp_path / "long"), "--out", str(tmp_path / "out")]) == 0


# -- massive activations -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def massive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The embedded model with one channel of the embedding a thousand times as loud, and its conversion."""
    folder = tmp_path_factory.mktemp("massive")
    shutil.copytree(REFERENCE, folder / "reference")
    for file in (folder / "reference").glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor[:, LOUD] *= 1000
        save_file(tensors, file, metadata={"format": "pt"})
    convert(folder / "reference", folder / "candidate", "slime", Parallel(), None)
    yield folder / "reference", folder / "candidate"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_channel_a_thousand_times_as_loud_raises_no_alarm(dtype: str, massive: tuple[Path, Path], tmp_path: Path) -> None:
    page = judged(massive[1], tmp_path, "one", more=("--dtype", dtype), reference=massive[0])
    assert (page["verdict"], found(page)) == ("agrees", [])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (CHANNEL, made([2], "pre_mlp_norm")),
        (CHANNEL.replace("[40]", f"[{LOUD}]"), made([2], "pre_mlp_norm")),
        ("model.embedding.word_embeddings.weight[:, 40].mul_(1.02)", made([], "embedding")),
        (EXPERT, made([5], "experts", "fc2")),
        (BOUNDARY, made([4], "pre_mlp_norm")),
    ],
    ids=["a quiet channel", "the loud one", "a quiet channel of the embedding", "an expert", "a token"],
)
def test_a_channel_a_thousand_times_as_loud_hides_nothing(line: str, expected: Verdict, massive: tuple[Path, Path], tmp_path: Path) -> None:
    assert found(judged(massive[1], tmp_path, "one", line, reference=massive[0])) == [expected]
