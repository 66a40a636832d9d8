#!/usr/bin/env bash
# The GPU kernels and the engine on this machine's GPU: correctness, then times, in under 6 minutes.
# Needs PyTorch with CUDA, Triton and numpy, and for the engine what TightKV requires; the C++
# extension need not be built. No network, no model. Writes one JSON.
#
#     benchmarks/gpu/run.sh [PYTHON] [FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec env PYTHONPATH=src:. "${1:-python3}" -m benchmarks.gpu.measure \
	--output "${2:-benchmarks/results/gpu.json}"
