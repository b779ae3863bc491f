#!/bin/bash
# A run of the runtime torchrun over the nodes of a Slurm job:  sbatch examples/cluster/slurm_torchrun.sh run.toml
# Continue it in a second job:  sbatch --dependency=afterany:JOBID examples/cluster/slurm_torchrun.sh --resume RUNFOLDER
# Further options go to engine, such as --steps 100 or --set KEY=VALUE.
# The run file, data, model and run folder lie where all nodes see them; every node has the same Python environment.
# Five minutes before the job's time is up the run is saved and ends; to do that at once:  scancel --signal=USR1 --batch JOBID
#SBATCH --job-name=engine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
set -euo pipefail

command=train
if [ "${1:-}" = --resume ]; then command=resume; shift; fi
run=${1:?usage: sbatch slurm_torchrun.sh RUN.toml [OPTION]..., or sbatch slurm_torchrun.sh --resume RUNFOLDER [OPTION]...}
shift
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-} # srun does not take it from sbatch
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
ENGINE_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export ENGINE_TOKEN

# torchrun passes SIGTERM on to every rank; only rank 0 reacts: it saves and ends the others. Without --shutdown-timeout
# torchrun kills it after 30 seconds.
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --shutdown-timeout 270 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    --no-python engine "$command" "$run" --set runtime.backend=torchrun "$@" &
srun=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1
code=0
wait "$srun" || code=$?
while kill -0 "$srun" 2>/dev/null; do # a signal ends the wait, not the run
    code=0
    wait "$srun" || code=$?
done
exit "$code"
