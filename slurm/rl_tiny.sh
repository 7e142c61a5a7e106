#!/bin/bash
# Submit configs/slurm_tiny.yaml as one heterogeneous job and follow it: `sbatch slurm/rl_tiny.sh [key=value …]`, from the
# repository's folder. This job is small and only follows: it may end at any moment, the run goes on in the job that it submits.
#SBATCH --job-name=prl-follow
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=500
#SBATCH --time=30
#SBATCH --no-requeue
set -euo pipefail
exec "${PRL_PYTHON:-.venv/bin/python}" -m prl.launch configs/slurm_tiny.yaml --site "${PRL_SITE:-configs/site/example.yaml}" "$@"
