#!/bin/bash
# A run script in the manner of slime's: what it would run is none of a reader's business.
pkill -9 python
set -ex

if [ -z "${BASE_FOLDER}" ]; then
  echo "BASE_FOLDER is not set"
  exit 1
fi

NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
else
    HAS_NVLINK=0
fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/35b.sh"

CKPT_ARGS=(
   --hf-checkpoint ${BASE_FOLDER}/Qwen3.5-35B-A3B
   --load ${BASE_FOLDER}/Qwen3.5-35B-A3B_slime/
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   # --micro-batch-size 1
)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 128)
)
PERF_ARGS+=(--context-parallel-size 1)

cat <<EOF > hosts.txt
--num-layers 7
EOF

for WORKER in $(awk '{print $1}' hostfile); do
  if [[ "$WORKER" == "$FIRST_WORKER" ]]; then
    continue
  fi
  ssh root@"${WORKER}" "pkill -9 python ; ray start --address=${MASTER_ADDR}:6379" &
done
wait

RUNTIME_ENV_JSON="{
  \"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\", \"MASTER_ADDR\": \"${MASTER_ADDR}\"}
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${MISC_ARGS[@]}
