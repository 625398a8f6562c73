# Sourced by scripts/test, scripts/check and scripts/demo: leaves $VENV with the package and its tools installed, or stops
# with the one command that the reader has to run. A second run with an unchanged pyproject.toml costs a hash and nothing else.
#
# Reads SPOTWARP_VENV (where the virtual environment lives; default: .venv in the checkout).
# set_up [--no-fuse] is the only function to call.

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${SPOTWARP_VENV:-$CHECKOUT/.venv}
# The program refuses variables of its own prefix that it does not know, so that a misspelt one is never passed over.
unset SPOTWARP_VENV

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && is_new_enough "$name"; then echo "$name"; return; fi
  done
  return 1
}

has_headers() { "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; }

# Prints the Debian packages that are missing, one a line. $1: python or empty; $2: 1 when FUSE is wanted.
missing_packages() {
  local python=$1 fuse=$2 name=python3
  if [ -z "$python" ]; then
    # Ubuntu 22.04's own python3 is 3.10, and it has python3.11 beside it.
    if command -v python3 >/dev/null; then name=python3.11; fi
    echo "$name" "$name-venv" "$name-dev" | tr ' ' '\n'
  else
    case $python in python3.*) name=$python ;; esac
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$name-venv"
    [ "$fuse" = 0 ] || has_headers "$python" || echo "$name-dev"
  fi
  [ "$fuse" = 1 ] || return 0
  command -v fusermount3 >/dev/null || echo fuse3
  command -v pkg-config >/dev/null || echo pkg-config
  command -v gcc >/dev/null || command -v cc >/dev/null || echo gcc
  [ -e /usr/include/fuse3/fuse.h ] || pkg-config --exists fuse3 2>/dev/null || echo libfuse3-dev
}

as_root() {
  if [ "$(id -u)" = 0 ]; then env "$@"; else sudo -n env "$@"; fi
}

install_packages() {
  local command="apt-get install -y --no-install-recommends $*"
  command -v apt-get >/dev/null || stop "please install, with this system's package manager, what Debian calls: $*"
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    stop "system packages are missing, and this user may not install them. Please run, then start again:  sudo $command"
  fi
  say "installing system packages: $*"
  # A fresh container has no package lists, a long-lived one has stale lists: fetch them only when the first try fails.
  as_root DEBIAN_FRONTEND=noninteractive $command >/dev/null 2>&1 && return
  as_root DEBIAN_FRONTEND=noninteractive apt-get update >/dev/null || say "apt-get update failed; trying with the lists at hand"
  as_root DEBIAN_FRONTEND=noninteractive $command >&2 || stop "apt could not install: $*"
}

ready_stamp() {
  { cat "$CHECKOUT/pyproject.toml"; echo "$1 $2 $CHECKOUT"; } | sha256sum | cut -d' ' -f1
}

pip_install() {
  local log=$VENV/setup.log
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input -e "$CHECKOUT[$1]" >"$log" 2>&1 && return
  tail -n 30 "$log" >&2
  if grep -q pyfuse3 "$log" && grep -qiE 'fuse3|Python\.h|gcc|metadata-generation-failed|Failed building wheel' "$log"; then
    say "pyfuse3 has no wheel and could not be compiled here (it needs gcc, pkg-config, libfuse3-dev >= 3.2 and Python's headers)."
    say "Without FUSE, everything but the mount can be tested: scripts/test --no-fuse"
  fi
  stop "pip could not install the package; the whole log is $log"
}

set_up() {
  local fuse=1 extras=dev python stamp
  local -a missing
  if [ "${1:-}" = --no-fuse ]; then fuse=0 extras=demo,test; fi
  python=$(find_python) || python=
  mapfile -t missing < <(missing_packages "$python" "$fuse")
  [ ${#missing[@]} = 0 ] || install_packages "${missing[@]}"
  [ -n "$python" ] || python=$(find_python) || stop "Python 3.11 or newer is needed; found $(python3 --version 2>&1)"

  mkdir -p "$VENV"
  exec 9>"$VENV/setup.lock"
  ! command -v flock >/dev/null || flock 9
  stamp=$(ready_stamp "$("$python" --version)" "$fuse")
  if [ "$(cat "$VENV/setup.stamp" 2>/dev/null)" != "$stamp" ]; then
    # An environment whose interpreter has gone (an upgraded system Python) is made anew; a working one is only brought up to date.
    if ! "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      say "making $VENV with $("$python" --version)"
      "$python" -m venv --clear "$VENV" || stop "$python -m venv $VENV failed"
    fi
    say "installing the package and its tools ($extras)"
    pip_install "$extras"
    # pip compiles what it copies, but not a checkout that it links to. Where PYTHONDONTWRITEBYTECODE is set (many container
    # images), every process would compile the whole package again: half a second or more for each start of a daemon.
    "$VENV/bin/python" -m compileall -q -j 0 "$CHECKOUT"/{spotwarp_fs,provisioner,tests} || stop "a source file is damaged, see above"
    echo "$stamp" >"$VENV/setup.stamp"
  fi
  exec 9>&-
}

# Says what keeps this machine from mounting, or nothing when it can.
why_no_fuse() {
  if [ ! -c /dev/fuse ]; then echo "/dev/fuse does not exist (in a container: --device /dev/fuse --cap-add SYS_ADMIN)"
  elif ! (: <>/dev/fuse) 2>/dev/null; then echo "/dev/fuse cannot be opened by $(id -un)"
  elif ! command -v fusermount3 >/dev/null; then echo "fusermount3 is not installed (apt-get install fuse3)"
  elif ! "$VENV/bin/python" -c 'import pyfuse3' 2>/dev/null; then echo "pyfuse3 cannot be imported from $VENV"
  fi
}
