#!/bin/bash
# A Ray cluster over the nodes of a Slurm job, and a run on it:  sbatch examples/cluster/slurm.sh run.toml
# The run file, data, model and run folder lie where all nodes see them; every node has the same Python environment.
#SBATCH --job-name=engine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

run=${1:?usage: sbatch slurm.sh RUN.toml}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):6379

# A token for this job alone, in a file that only its owner reads, on the file system that all nodes share.
token=$(mktemp "$PWD/.ray-token-XXXXXX")
trap 'rm -f "$token"' EXIT
chmod 600 "$token"
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0

# Signals that end the job go to engine, which saves the run; Slurm ends the nodes with the job.
srun --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --port=6379 --include-dashboard=false --block &
sleep 15
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$address" --block &
    sleep 15
fi
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    engine train "$run" --set runtime.backend=ray --set "runtime.ray.address=$address"
