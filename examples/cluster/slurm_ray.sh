#!/bin/bash
# A Ray cluster over the nodes of a Slurm job, and a run on it:  sbatch examples/cluster/slurm_ray.sh run.toml
# The run file, data, model and run folder lie where all nodes see them; every node has the same Python environment.
# To stop it so that the run is saved:  scancel --signal=USR1 --batch JOBID  (a plain scancel ends the nodes with it: the
# newest checkpoint is what stays). To go on:  sbatch examples/cluster/slurm_ray.sh --resume RUNFOLDER
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
run=${1:?usage: sbatch slurm_ray.sh RUN.toml, or sbatch slurm_ray.sh --resume RUNFOLDER}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):6379
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")

# A token for this job alone, in a file that only its owner reads, on the file system that all nodes share.
token=$(mktemp "$PWD/.ray-token-XXXXXX")
trap 'rm -f "$token"' EXIT
chmod 600 "$token"
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0

# Until so many nodes are there: a run that begins before would take the GPUs that it finds.
wait_for() {
    "${on_head[@]}" python - "$address" "$1" <<'EOF'
import sys, time, ray
address, wanted, end = sys.argv[1], int(sys.argv[2]), time.monotonic() + 300
while True:
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        found = 0
    if found >= wanted:
        break
    if time.monotonic() > end:
        sys.exit(f"slurm_ray.sh: {found} of {wanted} nodes have joined the Ray cluster at {address} within 5 minutes")
    time.sleep(1)
EOF
}

srun --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --port=6379 --include-dashboard=false --block &
wait_for 1
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$address" --block &
    wait_for "$SLURM_JOB_NUM_NODES"
fi

# Slurm signals this script alone, 5 minutes before the time is up; engine saves the run and ends with 75.
"${on_head[@]}" engine "$command" "$run" --set runtime.backend=ray --set "runtime.ray.address=$address" &
engine=$!
trap 'kill -USR1 "$engine"' USR1
code=0
wait "$engine" || code=$?
while kill -0 "$engine" 2>/dev/null; do  # a signal ends the wait, not the run
    code=0
    wait "$engine" || code=$?
done
exit "$code"
