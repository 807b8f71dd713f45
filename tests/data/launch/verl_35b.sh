#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
    gpu)
        TP=${TP:-2}
        EP=${EP:-8} ;;
    npu)
        TP=${TP:-2}
        EP=${EP:-4} ;;
    *)
        echo "Unsupported DEVICE=${DEVICE}" >&2
        exit 1 ;;
esac
PP=${PP:-1}

DATA=(data.train_files=${train_path} data.truncation='error')
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PP}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP}
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.dtype=bfloat16
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    ++actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True
)
if [ "${DEVICE}" = npu ]; then
    ACTOR+=(actor_rollout_ref.actor.megatron.use_remove_padding=True)
fi
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ]; then
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    trainer.logger='["console","wandb"]' \
    "$@"
