#!/usr/bin/env bash
# Makes the virtual environment: scripts/make_venv.sh VENV [PYTHON]
# Registries, mirrors and wheel folders are the user's own pip configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
wanted=${2:-}

# The pinned numpy has wheels up to 3.12; a name on the PATH may be a shim that does not run.
usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

candidates=(python3.11 python3.12 python3)
if [ -n "$wanted" ]; then
    candidates=("$wanted")
fi
python=
for candidate in "${candidates[@]}"; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: ${wanted:-python3.11} is not Python 3.11 or 3.12:" \
        "install Python 3.11, or name one with \`make PYTHON=/path/to/python3.11 ...\`" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "error: $python has no venv module: install it (Debian and Ubuntu: apt-get install" \
        "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))" >&2
    exit 1
fi

if [ ! -f "$venv/.ready" ] || ! usable "$venv/bin/python"; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
# From here until the caller stamps it again, the environment counts as half made.
rm -f "$venv/.ready"

"$venv/bin/python" -m pip install --quiet -c constraints.txt -e '.[engine,prepare,plot,dev]'
"$venv/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements-wheels.txt
