#!/usr/bin/env bash
# The GPU kernels on this machine's GPU: correctness, then times. Needs PyTorch with CUDA, Triton
# and numpy; no network, no model. Under 6 minutes. The last line of standard output is one JSON.
#
#     benchmarks/gpu/run.sh [PYTHON] > gpu.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec env PYTHONPATH=src:. "${1:-python3}" -m benchmarks.gpu.kernels
