# Model flags, to be sourced.
MOE_LAYERS=40
DENSE_LAYERS=0
HIDDEN=2048

MODEL_ARGS=(
   --spec "slime_plugins.models.qwen3_5" "get_qwen3_5_spec"
   --disable-bias-linear
   --qk-layernorm
   --group-query-attention
   --num-attention-heads 16
   --num-query-groups 2
   --kv-channels 256
   --num-layers $((MOE_LAYERS + DENSE_LAYERS))
   --hidden-size ${HIDDEN}
   --normalization RMSNorm
   --apply-layernorm-1p
   --position-embedding-type rope
   --norm-epsilon 1e-6
   --rotary-percent 0.25
   --swiglu
   --untie-embeddings-and-output-weights
   --vocab-size 248320
   --rotary-base "${ROPE_THETA:-10000000}"
   # experts
   --moe-ffn-hidden-size 512
   --moe-shared-expert-intermediate-size 512
   --moe-router-score-function softmax
   --moe-router-topk 8
   --moe-layer-freq [0]*$DENSE_LAYERS+[1]*$MOE_LAYERS
   --num-experts 256
   --attention-output-gate
   --moe-shared-expert-gate
)
