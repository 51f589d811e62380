#!/bin/bash
# A training on two machines of eight GPUs, under Slurm:
#
#     sbatch configs/jobs/slurm.sh RECIPE.yaml [--section.key value ...]
#
# Submit it from the clone, with the environment active. Each member of the array is a run of its own, by its seed. Change
# the lines below for other machines; everything that --export passes on, such as HF_TOKEN, is there.
#SBATCH --job-name=vaswani
#SBATCH --array=1-3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
# After the failure of a machine, Slurm starts the job again, and the run goes on.
#SBATCH --requeue
# Five minutes before its time is over, this script gets SIGUSR1: it stops the training, and puts the job in the queue. So
# it does before a preemption, if the cluster's PreemptParameters have send_user_signal.
#SBATCH --signal=B:USR1@300
set -euo pipefail

recipe=$1
seed=${SLURM_ARRAY_TASK_ID:-1}
run=runs/$(basename "$recipe" .yaml)-$seed
read -r first_machine < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Since version 22.05, srun does not take it from the line above.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# With these, a machine that has failed can come back, and a checkpoint may take longer than 30 seconds.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_machine:$((20000 + SLURM_JOB_ID % 20000))" \
    train.py "$recipe" --run_dir "$run" --seed "$seed" "${@:2}" &
step=$!

time_is_over=
trap 'time_is_over=1; kill -TERM "$step" || true' USR1
trap 'kill -TERM "$step" || true' TERM
# A signal ends `wait`, but not the step.
code=1
while kill -0 "$step" 2> /dev/null; do
    code=0
    wait "$step" || code=$?
done
if [ -n "$time_is_over" ] && [ "$code" -ne 0 ]; then
    # A run that has saved nothing would start from the beginning again, without end.
    if compgen -G "$run/checkpoint-*" > /dev/null; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "The time was over before $run had a checkpoint: the job is not queued again. Raise --time." >&2
    fi
fi
exit "$code"
