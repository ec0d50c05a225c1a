#!/usr/bin/env bash
# The first hour on one GPU, by numbers (see first_hour.py):  bash experiments/benchmarks/first_hour.sh 1 2 3
# From the project's root. Nothing is installed: torch 2.11 or later with CUDA, and the packages of pyproject.toml; a wheel
# that the machine lacks (optree) travels unpacked in ./wheels, which git ignores. PY: the Python; DEVICE=cpu: a trial.
set -u
py=${PY:-python3}
export PYTHONPATH=.:experiments/benchmarks:wheels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0
for n in "$@"; do
  if [ "$n" = 1 ]; then
    timeout 100 "$py" -m fmegatron.doctor || status=1   # to fix: versions, limits, what else runs on the device
  fi
  echo "== call $n"
  timeout --kill-after=5 470 "$py" experiments/benchmarks/first_hour.py "$n" --device="${DEVICE:-cuda}"
  code=$?
  [ $code = 124 ] && echo "WRONG call $n took more than 470 s; it means: it hangs, or compiles for too long"
  [ $code = 0 ] || status=1
done
exit $status
