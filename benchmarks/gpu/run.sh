#!/usr/bin/env bash
# What one NVIDIA GPU does with this engine, within nine minutes: no Ray, no network.
# benchmarks/gpu/run.sh --tiny takes the same path on a CPU.  PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The run itself ends in time; this is for one that hangs.
exec timeout 570 "$python" -m benchmarks.gpu "$@"
