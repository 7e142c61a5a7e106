#!/bin/bash
# component 0: train
#SBATCH --job-name=two
#SBATCH --chdir=/
#SBATCH '--output=/shared/it'"'"'s 100%%/jobs/batch.log'
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --partition=h200
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:8
#SBATCH --mem=0
#SBATCH --time=60
#SBATCH --no-kill
#SBATCH hetjob
# component 1: hold
#SBATCH --partition=l40
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --time=60
#SBATCH --no-kill
#SBATCH hetjob
# component 2: serve
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --mem=0
#SBATCH --time=60
#SBATCH --no-kill

folder='/shared/it'"'"'s 100%/jobs'
export SUBMITIT_EXECUTOR=hetslurm
component() {  # NAME TASKS LIVES COMMAND…: unless all have results; its end is written down unless the job ends
  local at="$folder/$1/$SLURM_JOB_ID" told= pid code
  (($2 && $(ls "$at"_*_result.pkl 2>/dev/null | wc -l) == $2)) && exit 0
  rm -f "$at"_ended "$at"_again "$at"_*.save_tmp
  trap 'kill -USR2 $pid 2>/dev/null' USR2; trap told=1 TERM
  "${@:4}" & pid=$!
  while wait $pid; code=$?; kill -0 $pid 2>/dev/null; do :; done
  wait $pid; code=$?
  ((code == 143)) && sleep 1  # SIGTERM may be for the whole job, and come here a moment later
  [[ $told ]] && exit $code
  if ((code > 128 && (code != 143 || $2) && ${SLURM_RESTART_COUNT:-0} < $3)); then
    echo "component $1 was killed (exit code $code): job $SLURM_JOB_ID is run again" >&2
    : >"$at"_again
  fi
  echo $code >"$at"_ended
  exit $code
}
parts=() told= first=0
trap 'kill -USR2 "${parts[@]}" 2>/dev/null' USR2; trap told=1 TERM
component train 16 0 srun --het-group=0 --job-name=train --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block --cpus-per-task=12 --cpu-bind=none --mem=0 --gres=gpu:8 --overlap --wait=0 --mpi=none --unbuffered --export=ALL --kill-on-bad-exit=1 --input=none --output='/shared/it'"'"'s 100%%/jobs/train'/${SLURM_JOB_ID}_%t_log.out --error='/shared/it'"'"'s 100%%/jobs/train'/${SLURM_JOB_ID}_%t_log.err --open-mode=append python -u -m prl.launch.slurm.component "$folder"/train & parts+=($!)
component serve 4 2 srun --het-group=2 --job-name=serve --nodes=4 --ntasks=4 --ntasks-per-node=1 --distribution=block --cpus-per-task=1 --cpu-bind=none --mem=0 --gres=gpu:1 --overlap --wait=0 --mpi=none --unbuffered --export=ALL --kill-on-bad-exit=1 --input=none --output='/shared/it'"'"'s 100%%/jobs/serve'/${SLURM_JOB_ID}_%t_log.out --error='/shared/it'"'"'s 100%%/jobs/serve'/${SLURM_JOB_ID}_%t_log.err --open-mode=append env 'GREETING=good day, it'"'"'s 5%' python -u -m prl.launch.slurm.component "$folder"/serve & parts+=($!)
for part in "${parts[@]}"; do
  while wait $part; code=$?; kill -0 $part 2>/dev/null; do :; done
  wait $part; code=$?
  ((first)) || first=$code
done
if [[ ! $told ]] && ls "$folder"/*/"$SLURM_JOB_ID"_again >/dev/null 2>&1; then
  scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $first
