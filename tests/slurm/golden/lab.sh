#!/bin/bash
# component 0: trainer
#SBATCH --job-name=prl-first
#SBATCH --chdir=/prl
#SBATCH --output=/runs/first/logs/slurm.log
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

folder=/runs/first/slurm
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
component trainer 0 10 '/home/me/my env/bin/python' -u -m prl.launch.slurm.component "$folder"/trainer & parts+=($!)
for part in "${parts[@]}"; do
  while wait $part; code=$?; kill -0 $part 2>/dev/null; do :; done
  wait $part; code=$?
  ((first)) || first=$code
done
if [[ ! $told ]] && ls "$folder"/*/"$SLURM_JOB_ID"_again >/dev/null 2>&1; then
  scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $first
