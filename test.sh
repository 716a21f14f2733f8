#!/usr/bin/env bash
# Runs the tests; sets up .venv on first use, as run.sh does. No GPU and no network are needed.
#
#   ./test.sh                    the tests of everyday work, at most 10 minutes on 2 cores
#   ./test.sh --full             all of them
#   ./test.sh -k parity -x       further arguments go to pytest

case ${1:-} in
  --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
esac
cd "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)" || exit 1
. ./setup.sh

SELECT=(-m "not full")
ARGUMENTS=()
for word in "$@"; do
  if [ "$word" = --full ]; then
    SELECT=()
  else
    ARGUMENTS+=("$word")
  fi
done
# Most tests start two processes.
cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / 2 > 0 ? cores / 2 : 1))}
exec "$PYTHON" -m pytest "${SELECT[@]}" "${ARGUMENTS[@]}"
