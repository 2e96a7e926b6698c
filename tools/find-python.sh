#!/bin/sh
# find-python.sh MAJOR.MINOR: prints the path of the first Python of at least that version that can make virtual
# environments. $PYTHON, where set, is the only candidate. Fails with what was found otherwise.
set -u
need=$1

# A name on PATH may be a pyenv shim whose version is not selected, so a candidate counts only once it has run.
probe='
import sys
need = tuple(int(part) for part in sys.argv[1].split("."))
if sys.version_info[:2] < need:
    problem = ""
else:
    try:
        import ensurepip, venv
        problem = None
    except ImportError:
        problem = " without the venv module (Debian: apt install python3-venv)"
version = "%d.%d.%d" % tuple(sys.version_info[:3])
print(sys.executable if problem is None else "! %s is %s%s" % (sys.executable, version, problem))
'

found=""
try() {
    answer=$("$1" -c "$probe" "$need" 2>/dev/null) || return 1
    case $answer in
    "") return 1 ;;
    "! "*)
        found="$found
  ${answer#! }"
        return 1
        ;;
    esac
    printf '%s\n' "$answer"
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a usable Python >= $need${found:+:$found}" >&2
    exit 1
fi

for name in python3 python3.11 python3.12 python3.13 python3.14 python; do
    command -v "$name" >/dev/null 2>&1 && try "$name" && exit 0
done
if root=$(pyenv root 2>/dev/null); then
    for path in "$root"/versions/*/bin/python; do
        [ -x "$path" ] && try "$path" && exit 0
    done
fi
echo "no Python >= $need with venv was found; install one, or name it with PYTHON=/path/to/python.${found:+ Found:$found}" >&2
exit 1
