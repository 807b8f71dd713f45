"""Megatron's command line: which flags shape a model or its layout, under which args they are kept, and how their values are read."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bisect_tool.launch.words import Where, Word, refuse

LONGEST_PATTERN = 10_000


def pattern(text: str) -> int | list[int]:
    """`--moe-layer-freq`: a number, or a Python expression of lists such as `[0]*3+[1]*57` (Megatron evaluates it, here it is read)."""
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]()+* \n]", text):
        raise ValueError(text)
    return _listed(ast.parse(text.strip(), mode="eval").body)


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_counted(one) for one in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            many, times = (left, right) if not isinstance(left, ast.Constant) else (right, left)
            found, count = _listed(many), _counted(times)
            if len(found) * count > LONGEST_PATTERN:
                raise ValueError("too long")
            return found * count
    raise ValueError(ast.unparse(node))


def _counted(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(ast.unparse(node))


def whole(text: str) -> int | None:
    """A whole number; a count may be written as none."""
    return None if text.lower() == "none" else int(text)


def size(text: str) -> int | None:
    """A parallel size: a whole number from 1 up, or none."""
    found = whole(text)
    if found is not None and found < 1:
        raise ValueError(text)
    return found


KINDS: dict[Any, str] = {float: "number", size: "whole number from 1 up"}


def kind(read: Any) -> str:
    """What a value of a flag has to be, for a person."""
    return KINDS.get(read, "whole number")


Read = Callable[[str], Any]
ON, OFF, WORDS = "on", "off", "words"

_SWITCHES_ON = """
    group-query-attention qk-layernorm apply-layernorm-1p swiglu untie-embeddings-and-output-weights attention-output-gate
    use-gated-attention moe-shared-expert-gate moe-router-pre-softmax moe-router-enable-expert-bias add-qkv-bias rotary-interleaved
    use-rope-scaling sequence-parallel bf16 fp16 moe-grouped-gemm moe-permute-fusion moe-shared-expert-overlap
    moe-pad-expert-input-to-capacity moe-router-force-load-balancing moe-apply-probs-on-input multi-latent-attention squared-relu
    openai-gelu qk-l2-norm apply-residual-connection-post-layernorm use-rotary-position-embeddings
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split attention-softmax-in-fp32 fp32-residual-connection
    moe-enable-deepep quick-geglu use-checkpoint-args post-self-attn-layernorm post-mlp-layernorm
"""
_WHOLE = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size make-vocab-size-divisible-by
    max-position-embeddings seq-length mtp-num-layers rotary-seq-len-interpolation-factor num-experts moe-ffn-hidden-size
    moe-router-topk moe-router-num-groups moe-router-group-topk moe-shared-expert-intermediate-size linear-num-key-heads
    linear-key-head-dim linear-num-value-heads linear-value-head-dim linear-conv-kernel-dim decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers moe-latent-size moe-router-topk-limited-devices
"""
_SIZES = """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank virtual-pipeline-model-parallel-size
    actor-num-nodes actor-num-gpus-per-node
"""
_FRACTIONS = """
    norm-epsilon rotary-base rotary-percent rope-scaling-factor moe-router-topk-scaling-factor moe-expert-capacity-factor
    hidden-dropout attention-dropout moe-input-jitter-eps softmax-scale activation-func-clamp-value
    glu-linear-offset
"""
_TEXTS = """
    normalization position-embedding-type rope-type moe-router-score-function moe-router-dtype moe-token-dispatcher-type
    moe-token-drop-policy experimental-attention-variant linear-attention-type attention-backend transformer-impl softmax-type
    megatron-to-hf-mode hf-checkpoint pipeline-model-parallel-layout load ref-load
    hybrid-override-pattern heterogeneous-layers-config-path yaml-cfg
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """How a flag is read: under which arg, and a switch, a list of words, or a value."""

    arg: str
    read: Read | str


def _table() -> dict[str, Flag]:
    found: dict[str, Flag] = {}
    for names, read in ((_SWITCHES_ON, ON), (_WHOLE, whole), (_SIZES, size), (_FRACTIONS, float), (_TEXTS, str)):
        for name in names.split():
            found[f"--{name}"] = Flag(name.replace("-", "_"), read)
    found |= {
        "--moe-layer-freq": Flag("moe_layer_freq", pattern),
        "--linear-attention-freq": Flag("linear_attention_freq", pattern),
        "--no-rope-freq": Flag("no_rope_freq", pattern),
        "--spec": Flag("spec", WORDS),
        "--moe-router-load-balancing-type": Flag("moe_router_load_balancing_type", WORDS),
        "--mrope-section": Flag("mrope_section", WORDS),
        "--window-size": Flag("window_size", WORDS),
        "--disable-bias-linear": Flag("add_bias_linear", OFF),
        "--no-position-embedding": Flag("add_position_embedding", OFF),
        "--layernorm-epsilon": Flag("norm_epsilon", float),
    }
    return found


FLAGS = _table()
# args whose values say nothing of the model or its layout: they may be unknown
MAY_BE_UNKNOWN = {"hf_checkpoint", "load", "ref_load", "actor_num_nodes", "actor_num_gpus_per_node", "attention_backend", "seq_length"}

# flags that say nothing of what the model computes, by how their names begin: training, data, logging, storage, scheduling, rollouts
_HARMLESS = """
    lr min-lr adam sgd muon weight-decay start-weight-decay end-weight-decay clip-grad optimizer decoupled use-precision-aware-optimizer
    loss-scale initial-loss-scale min-loss-scale hysteresis override-opt use-checkpoint-opt global-batch-size micro-batch-size rampup train-
    eval- exit- seed num-epoch num-rollout num-workers num-dataset-builder save load ckpt auto-detect-ckpt dist-ckpt async-save no-load
    no-save use-dist-ckpt use-persistent-ckpt finetune log- logging tensorboard wandb use-wandb one-logger timing-log profile
    use-pytorch-profiler record-memory memory-snapshot tokenizer vocab-file merge-file data- split dataloader mock-data eod-mask-loss
    prompt input-key label-key metadata-key tool-key apply-chat-template rollout rm- reward group-rm custom-rm custom-generate
    advantage kl- use-kl use-tis tis- eps-clip entropy gamma lambd n-samples over-sampling dynamic-sampling balance-data
    use-dynamic-batch-size max-tokens-per-gpu sglang use-rollout use-slime-router actor- critic- ref- colocate offload
    update-weight recompute overlap tp-comm distributed ddp use-distributed-optimizer use-megatron-fsdp accumulate-allreduce
    grad-reduce gradient-accumulation no-gradient-accumulation calculate-per-token-loss cross-entropy check-for manual-gc cuda-graph
    enable-cuda-graph deterministic-mode nccl use-flash-attn no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-masked-softmax-fusion no-rope-fusion no-persist-layer-norm
    no-check-for-nan init-method use-cpu-initialization no-initialization moe-aux-loss-coeff moe-z-loss-coeff
    moe-router-bias-update-rate moe-router-fusion moe-router-padding moe-per-layer-logging moe-layer-recompute moe-deepep
    moe-flex-dispatcher-backend moe-hybridep delay-wgrad defer-embedding-wgrad cpu-offloading mtp-loss-scaling-factor debug- rl- grpo-
    use-fault-tolerance rerun-mode trust-remote-code enable-experimental
"""
# Megatron's other args that leave a language model alone: they stand in every checkpoint's args, with or without a flag
_ELSEWHERE = """
    adlr-autoresume align- allow-ambiguous app-tag apply-rope-fusion async-tensor barrier-with batch-size batch-p2p bert- biencoder block-data
    bias-activation-fusion bias-dropout-fusion bias-gelu-fusion bias-swiglu-fusion calc-ft cache-mla-latents
    check-weight-hash checkpoint-activations classes-fraction clone-scatter config-logger consumed- cp-comm-type create-attention-mask
    data-parallel data-per-class data-sharding deallocate-pipeline decode-only-cuda-graphs decoder-num-layers decoder-seq-length
    decrease-batch-size deprecated-use-mcore-models dino disable-chunked-prefill disable-gloo disable-mamba-mem disable-straggler
    disable-symmetric distrib-optim dump-param embedding-init embedding-path empty-unused enable-ft enable-full-sharding enable-gloo
    enable-msc enable-one-logger encoder-num-layers encoder-seq-length error-injection evidence-data external-cuda-graph
    fp16-lm-cross-entropy fsdp- full-validation gradient-reduce head-lr-mult hierarchical-context high-priority ict- img-h img-w indexer
    inference- init-model-with inprocess iter-per-epoch iteration iterations-to-skip keep-fp8-transpose langrl lazy-mpu legacy-tokenizer
    local-rank main-grads main-params exp-avg mamba- mask- masked-softmax-fusion max-tokens microbatch-group mid-level mlp-chunks
    mmap-bin mocked model-parallel-size moe-extended-tp moe-pad-experts-for-cuda moe-upcycling moe-use-legacy moe-use-upcycling
    multiple-validation no-barrier no-clone no-create no-data-sharding no-manual no-mmap no-one-logger no-pin no-scatter no-strict
    no-use-tokenizer non-persistent num-channels num-classes num-distributed num-microbatches object-storage onnx-safe padded-vocab-size
    params-dtype patch-dim per-split perform- persist-layer-norm pin-cpu pipeline-model-parallel-comm pretrained-checkpoint
    query-in-block rank replication reset- result-rejected retriever- retro- retain- run-workload sample-rate scatter-gather
    sharp-enabled short-seq skip-train skipped- store-param straggler strict-fsdp suggested-communication swin symmetric-ar te-rng
    test-mode tiktoken titles-data torch-fsdp2 transformer-pipeline use-fused-weighted use-legacy-te use-mcore-models
    use-mp-args use-nccl-ub use-one-sent use-ring-exchange use-sharp use-te-activation use-te-rng use-tokenizer-model use-torch
    fp8- fp4- num-layers-at first-last-layers tp-only-amax use-tp-pp-dp valid-data vision- virtual-pipeline vocab-extra-ids warmup wgrad-deferral world-size barrier
    test-data
"""
HARMLESS, ELSEWHERE = (tuple(f"--{name.rstrip('-')}" for name in names.split()) for names in (_HARMLESS, _ELSEWHERE))
# Megatron's args that make another model, of kinds that are not looked at here: the value that leaves a model alone
UNJUDGED: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "mscale": 1.0,
    "mscale_all_dim": 0.0, "rotary_scaling_factor": 1.0, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "is_hybrid_model": False,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "window_attn_skip_freq": None, "add_position_embedding": True,
    "apply_query_key_layer_scaling": False, "use_legacy_models": False, "fp8": None, "fp4": None, "retro_add_retriever": False,
    "fp8_format": None, "fp4_format": None, "rope_scaling": False,
}  # fmt: skip


def harmless(name: str) -> bool:
    """A flag outside our table that is known to leave the model alone."""
    return _begins(name, HARMLESS)


def unjudged(name: str) -> bool:
    """A flag that makes another model, of a kind that is not looked at here."""
    return name.removeprefix("--").replace("-", "_") in UNJUDGED


def harmless_arg(arg: str) -> bool:
    """The same of an arg that a checkpoint keeps, where most were given by nobody."""
    return arg not in UNJUDGED and _begins(f"--{arg}", (*HARMLESS, *ELSEWHERE))


def _begins(name: str, beginnings: Sequence[str]) -> bool:
    written = name.replace("_", "-").lower()
    return any(written == one or written.startswith(f"{one}-") for one in beginnings)


@dataclass
class CommandLine:
    """Words → args.  Raises UsageError naming the line of a value that matters and is not known, or is no value of its flag."""

    args: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Where] = field(default_factory=dict)
    unknown: list[tuple[str, Where]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubts: list[tuple[str, str]] = field(default_factory=list)

    def read(self, words: Sequence[Word]) -> CommandLine:
        at, open_flag = 0, False
        while at < len(words):
            word = words[at]
            name, equals, inline = word.text.partition("=")
            if not name.startswith("--") or name == "--":
                self._stray(word, open_flag)
                at, open_flag = at + 1, False
                continue
            flag = FLAGS.get(name)
            at += 1
            open_flag = flag is None and not equals
            if flag is None:
                self.unknown.append((name, word.where))
                continue
            values = [Word(inline, word.where, word.unknown, bare=word.bare)] if equals else []
            if not equals:
                while (
                    at < len(words)
                    and not words[at].text.startswith("--")
                    and (flag.read == WORDS or (flag.read not in (ON, OFF) and not values))
                ):
                    values.append(words[at])
                    at += 1
            self._give(name, flag, values, word)
        return self

    def _stray(self, word: Word, after_flag: bool) -> None:
        """A word that belongs to no flag of ours: nothing to us, unless it may hold flags."""
        if not word.unknown or not word.text.startswith("$") or (after_flag and not word.text.endswith("[@]}")):
            return
        if not word.unset:
            raise refuse(word.where, f"{word.text} may hold flags, and its value is not known: {word.unknown}")
        if "which is not read" in word.unknown:
            self.doubts.append((word.text, f"{word.where}: {word.unknown}"))
            return
        if not word.unknown.startswith("nothing"):  # a file that would set it is missing
            raise refuse(word.where, f"{word.text} may hold flags: {word.unknown}")
        self.notes.append(f"{word.where}: {word.unknown}; taken as empty")

    def _give(self, name: str, flag: Flag, values: list[Word], word: Word) -> None:
        unknown = next((one for one in values if one.unknown), None)
        if unknown is not None:
            if flag.arg in MAY_BE_UNKNOWN:
                return
            raise refuse(unknown.where, f"{name} is {unknown.text}, and {unknown.unknown}")
        texts = [one.text for one in values]
        value: Any = {ON: True, OFF: False, WORDS: texts}.get(flag.read) if isinstance(flag.read, str) else None
        if not isinstance(flag.read, str):
            value = self._value(name, flag.read, texts, word)
        if flag.read is pattern and isinstance(value, str):
            self.notes.append(
                f"{values[0].where}: {name} {value} is no pattern; bash cuts a list that is not quoted at its blanks (slime#1689). Quote it"
            )
        elif any(one.bare for one in values) and flag.read is pattern:
            self.notes.append(
                f"{values[0].where}: {name} {_short(texts[0])} is not quoted, and bash reads it as a file pattern: a file called "
                f"1 or 0 in the working directory would take its place (slime#1689); here it is judged as written. Quote it"
            )
        before = self.args.get(flag.arg)
        if flag.arg in self.args and before != value:
            self.notes.append(
                f"{name} is given twice: {_short(before)} in {self.said[flag.arg]}, then {_short(value)} in {word.where}; the last one counts"
            )
        self.args[flag.arg], self.said[flag.arg] = value, word.where

    def _value(self, name: str, read: Read, texts: list[str], word: Word) -> Any:
        if not texts:
            raise refuse(word.where, f"{name} has no value")
        try:
            return read(texts[0])
        except (ValueError, SyntaxError, RecursionError):
            if read is pattern:
                return texts[0]  # judged as it is: Megatron would not read it either
            raise refuse(word.where, f"{name} is {texts[0][:60]!r}, which is no {kind(read)}") from None


def nearest(name: str) -> str | None:
    """The flag of ours that an unknown one may be a misspelling of."""
    found = difflib.get_close_matches(name.replace("_", "-"), FLAGS, n=1, cutoff=0.85)
    return found[0] if found else None


def is_flag(text: str) -> bool:
    """Whether a word is written as a flag, of whatever program."""
    return re.match(r"--?[A-Za-z]", text) is not None


def shapes(words: Sequence[Word]) -> int:
    """How many words are flags of ours: how a launch is told from any other command."""
    return sum(word.text.partition("=")[0] in FLAGS for word in words)


def says_flags(text: str) -> bool:
    """A text of several words with flags of ours among them."""
    return " " in text.strip() and any(one.partition("=")[0] in FLAGS for one in text.split())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:36]} ..."
