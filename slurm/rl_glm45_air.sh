#!/bin/bash
# RL of GLM-4.5-Air (configs/rl_glm45_air.yaml) on 2 nodes that train and 2 that generate: `sbatch slurm/rl_glm45_air.sh [key=value …]`, from the
# repository's folder. This job is small and only follows: it may end at any moment, the run goes on in the job that it submits.
#SBATCH --job-name=prl-follow
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=1000
#SBATCH --time=1440
#SBATCH --no-requeue
set -euo pipefail
exec "${PRL_PYTHON:-.venv/bin/python}" -m prl.launch configs/rl_glm45_air.yaml --site "${PRL_SITE:-configs/site/example.yaml}" \
  launch.slurm.trainer.nodes=2 launch.slurm.inference.nodes=2 "$@"
