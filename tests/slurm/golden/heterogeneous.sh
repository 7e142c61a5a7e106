#!/bin/bash
# component 0: trainer
#SBATCH --job-name=prl-first
#SBATCH --chdir=/home/me/prl
#SBATCH '--output=/shared/my runs/100%%/first/logs/slurm.log'
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@600
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --partition=train
#SBATCH --account=project
#SBATCH --qos=high
#SBATCH '--reservation=week 7'
#SBATCH --constraint=h200&ib
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gres=gpu:8
#SBATCH --mem=0
#SBATCH --time=1440
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH hetjob
# component 1: inference
#SBATCH --partition=infer
#SBATCH --account=project
#SBATCH --qos=high
#SBATCH '--reservation=week 7'
#SBATCH --constraint=h200&ib
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
#SBATCH --gres=gpu:4
#SBATCH --mem=0
#SBATCH --time=1440
#SBATCH --exclusive
#SBATCH --no-kill

module load cuda
trap 'kill -USR2 $lead' USR2; trap : TERM
python -m lead 'a run' &
lead=$!
while wait $lead; code=$?; kill -0 $lead 2>/dev/null; do :; done
wait $lead; code=$?
if ((code > 128 && code != 143 && ${SLURM_RESTART_COUNT:-0} < 10)); then
  echo "the supervisor was killed (exit code $code): job $SLURM_JOB_ID is run again" >&2
  scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $code
