#!/bin/bash
# component 0: trainer
#SBATCH --job-name=prl-slurm-tiny
#SBATCH --chdir=/prl
#SBATCH --output=/runs/slurm-tiny/logs/slurm.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@30
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --partition=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=1500
#SBATCH --time=20
#SBATCH --no-kill
#SBATCH hetjob
# component 1: inference
#SBATCH --partition=infer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=1500
#SBATCH --time=20
#SBATCH --no-kill

lead
