#!/bin/bash
# component 0: guests
#SBATCH --job-name=prl-slurm-tiny-replicas
#SBATCH --chdir=/prl
#SBATCH --output=/runs/first/logs/slurm-guests.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@30
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --partition=scavenge
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --mem=0
#SBATCH --time=20
#SBATCH --no-kill
