"""Which device to run on, whether TightKV was ever run there, and what is best stored there."""

from __future__ import annotations

import logging

import torch

from tightkv.config import DeviceConfig
from tightkv.errors import ConfigError
from tightkv.kernels import COMPILED_CAPABILITY, converts_fp8

__all__ = ["has_native_fp8", "log_device", "resolve_device"]

_logger = logging.getLogger("tightkv")

_RUN_ON: tuple[str, ...] = ("CPU",)
"""Where TightKV was run and its tests passed, as `_kind` says it. A GPU is added when all checks of
benchmarks/gpu/run.sh have passed on one of its kind."""


def resolve_device(config: DeviceConfig) -> torch.device:
    """The device to run on; auto is the CPU.

    Raises:
        ConfigError: if it is not there, or TightKV was never run on its kind and nobody said to go
            on; the message names the flag that does.
    """
    if config.device in ("auto", "cpu"):
        return torch.device("cpu")
    if config.device != "cuda":
        raise ConfigError(f"Unknown device {config.device!r}: choose auto, cpu or cuda.")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is 'cuda', but torch {torch.__version__} finds no GPU on this machine: "
            "install a driver and a build of torch for one, or choose --device cpu."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    kind = _kind(device)
    if kind not in _RUN_ON and not config.allow_untested_device:
        raise ConfigError(
            f"TightKV was never run on {kind} ({_name(device)}), only on {', '.join(_RUN_ON)}"
            f"{_checked(device)}: go on with --allow-untested-device, or choose --device cpu."
        )
    return device


def log_device(config: DeviceConfig, device: torch.device) -> None:
    """Say which 8-bit format suits the device, and what of the configuration it does not need."""
    if has_native_fp8(device):
        advice = "FP8 is recommended for an 8-bit KV cache, since it multiplies FP8 itself"
    else:
        advice = "INT8 is recommended for an 8-bit KV cache, since it has no FP8 units"
    _logger.info("Device: %s (%s); %s", _name(device), _kind(device), advice)
    if config.enforce_eager and device.type == "cpu":
        _logger.info("enforce_eager changes nothing on a CPU, where nothing is captured")


def has_native_fp8(device: torch.device) -> bool:
    """Whether a device multiplies FP8 itself; `tightkv plan` says the same of those it knows."""
    capability = _capability(device)
    return capability is not None and converts_fp8(capability)


def _capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's compute capability; None for others."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _kind(device: torch.device) -> str:
    capability = _capability(device)
    if capability is not None:
        return f"NVIDIA {_dotted(capability)}"
    return "CPU" if device.type == "cpu" else "AMD"


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return "this processor"
    return torch.cuda.get_device_name(device)


def _checked(device: torch.device) -> str:
    capability = _capability(device)
    if capability is None or capability < COMPILED_CAPABILITY:
        return f" (kernels are compiled for NVIDIA {_dotted(COMPILED_CAPABILITY)} and newer)"
    return ", though its kernels are compiled for it and checked"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
