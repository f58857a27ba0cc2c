#!/bin/bash
# sbatch --export=ALL,RUN=/shared/runs/e2e examples/slurm.sh      two machines of four GPUs each; the next submission resumes
#SBATCH --job-name=dpllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
set -euo pipefail
export PGPASSFILE=$HOME/.pgpass HF_HUB_OFFLINE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
resume=''
[ ! -d "$RUN/private/resume" ] || resume=--resume
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 4 \
  --rdzv_backend c10d --rdzv_endpoint "$head:29500" --rdzv_id "$SLURM_JOB_ID" --max_restarts 0 \
  recipes/train.py recipes/lora/e2e.yaml --output_dir "$RUN" $resume
