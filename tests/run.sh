#!/bin/sh
# Environment with the pinned versions, house rules, types, whole test suite (quick, offline, CPU). Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
bash .ci/venv
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
