# Sourced by run.sh and test.sh, in this folder: sets PYTHON to an interpreter that has what requirements.txt
# asks for, and puts the programs beside it first on PATH. It is
#   1. $PYTHON, if the caller sets it: used as it is;
#   2. the python3 of this shell (an activated environment, conda, a container), if nothing is missing there:
#      on a laptop without a GPU, for example, one with PyTorch's CPU wheel, which is ten times smaller;
#   3. .venv here, made on first use. .venv/complete is written last, with the checksum of requirements.txt, so
#      that an interrupted set-up, or one from an older requirements.txt, is completed by the next call.

# It also defines attended(), which runs a command so that a signal to the script ends it at once; a command in
# the foreground would be waited for. The command gets SIGTERM, and has to end what it started.

CHILD=
attended() {
  "$@" < /dev/null &
  CHILD=$!
  wait "$CHILD"
  local code=$?
  CHILD=
  return $code
}
interrupted() { # name of the signal, exit code
  trap '' INT TERM HUP
  if [ -n "$CHILD" ]; then
    kill -TERM "$CHILD" 2> /dev/null
    wait "$CHILD"
  fi
  echo "$(basename "$0"): interrupted by SIG$1" >&2
  exit "$2"
}
trap 'interrupted INT 130' INT
trap 'interrupted TERM 143' TERM
trap 'interrupted HUP 129' HUP

setup_fail() {
  echo "$(basename "$0"): error: $*" >&2
  exit 1
}

# Exit code 0 if the interpreter $1 has every package of requirements.txt, in whatever version, and a PyTorch
# that is new enough for the scripts. Packages are looked up, not imported: it takes no time.
has_requirements() {
  "$1" - requirements.txt 2> /dev/null << 'END'
import re, sys
from importlib.metadata import PackageNotFoundError, version
for line in open(sys.argv[1]):
    requirement, _, marker = line.split("#")[0].partition(";")
    name = re.split(r"[=<>!~\[ ]", requirement.strip())[0]
    if not name or ("linux" in marker and not sys.platform.startswith("linux")):
        continue
    try:
        found = version(name)
    except PackageNotFoundError:
        sys.exit(1)
    if name == "torch" and tuple(map(int, re.findall(r"\d+", found)[:2])) < (2, 9):
        sys.exit(1)
END
}

make_venv() {
  command -v python3 > /dev/null || setup_fail "there is no python3 here: install Python 3.10 or newer"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    setup_fail "Python 3.10 or newer is needed; python3 is $(python3 -c 'import platform; print(platform.python_version())')"
  python3 -c 'import ensurepip, venv' 2> /dev/null ||
    setup_fail "this python3 cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv"
  echo "Setting up .venv: PyTorch and the rest of requirements.txt, a download of several GB, once." >&2
  attended python3 -m venv .venv || setup_fail "python3 -m venv .venv failed"
  attended .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt >&2 ||
    setup_fail "pip could not install requirements.txt (see above); the next call goes on from here"
  cksum < requirements.txt > .venv/complete
}

if [ -n "${PYTHON:-}" ]; then
  PYTHON=$(command -v "$PYTHON") || setup_fail "PYTHON is set, but is not a program"
elif command -v python3 > /dev/null && has_requirements python3; then
  PYTHON=$(python3 -c 'import sys; print(sys.executable)')
else
  if [ "$(cat .venv/complete 2> /dev/null)" != "$(cksum < requirements.txt)" ]; then
    make_venv
  fi
  PYTHON=$PWD/.venv/bin/python
fi
PATH=$(dirname "$PYTHON"):$PATH # ninja, which DeepSpeed compiles with, is there
export PATH
