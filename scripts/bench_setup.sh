#!/bin/sh
# Makes .venv-bench with the rivals that `make bench` compares against, and gets iperf3.
# Every rival is optional: what cannot be installed is named here and in its row of the table.
set -u
PY=${PY:-python3}
BENCH_VENV=${BENCH_VENV:-.venv-bench}

if ! [ -x "$BENCH_VENV/bin/python" ]; then
    "$PY" -m venv "$BENCH_VENV" || {
        echo "cannot make $BENCH_VENV: rivals in Python will be missing" >&2
        exit 0
    }
fi
add() {
    # One at a time, so that a package without a wheel for this platform takes no other with it.
    "$BENCH_VENV/bin/python" -m pip --disable-pip-version-check -q install "$@" ||
        echo "not installed: $*" >&2
}
add 'numpy>=1.26'
# Without dependencies: they bring torch and CUDA, several GB that host memory never uses.
add --no-deps 'mooncake-transfer-engine-non-cuda>=0.3.13'
add --no-deps 'nixl-cu12>=1.0'

# Mooncake's extension is linked against the RDMA libraries, even when only tcp is used.
system_add() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "not installed: $* (needs root and apt-get)" >&2
        return
    fi
    # A package index may be missing on a fresh machine, hence the update.
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; } \
        >/dev/null 2>&1 || echo "not installed: $*" >&2
}
command -v iperf3 >/dev/null 2>&1 || system_add iperf3
"$BENCH_VENV/bin/python" -c 'import mooncake.engine' 2>/dev/null ||
    system_add libibverbs1 librdmacm1 libnuma1 libcurl4
exit 0
