"""Every error TightKV raises on purpose.

TightKVError
├── ConfigError (also ValueError)        a setting, or two settings together, cannot be served
│   ├── UnsupportedFormatError           a KV cache format that does not exist here
│   ├── UnsupportedModelError            a model that would be served wrongly
│   └── InsufficientMemoryError          the KV cache does not fit; says how much is missing
├── CheckpointError                      a model folder or file that cannot be read
├── ScaleError                           KV scales that are missing, surplus or not usable
├── OutputError                          a file that cannot be written
├── SwapError                            blocks that cannot be moved out or back
├── RequestError (also ValueError)       one request is wrong; no other request is touched
│   ├── InvalidSamplingParamsError
│   └── PromptTooLongError
├── KernelError (also RuntimeError)      no kernel for what was asked, or wrong tensors
└── EngineError (also RuntimeError)      the engine failed while it ran
    └── IntegrityError                   its notes contradict each other (--debug-integrity)

A message says what is wrong, what was given, what is allowed, and what to do.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "InsufficientMemoryError",
    "IntegrityError",
    "InvalidSamplingParamsError",
    "KernelError",
    "OutputError",
    "PromptTooLongError",
    "RequestError",
    "ScaleError",
    "SwapError",
    "TightKVError",
    "UnsupportedFormatError",
    "UnsupportedModelError",
]


class TightKVError(Exception):
    """Base of all errors raised on purpose; its text is one sentence for the user."""


class ConfigError(TightKVError, ValueError):
    """A setting, or two settings together, cannot be served."""


class UnsupportedFormatError(ConfigError):
    """A KV cache format that this layer, device or head size does not have."""


class UnsupportedModelError(ConfigError):
    """A model that this engine would serve wrongly, and therefore refuses."""


class InsufficientMemoryError(ConfigError):
    """The KV cache does not fit into the memory it may use."""


class CheckpointError(TightKVError):
    """A model folder or file that is missing, broken or of an unknown kind."""


class ScaleError(TightKVError):
    """KV scales that are missing, surplus, of the wrong shape, or not finite and positive."""


class OutputError(TightKVError):
    """A file that cannot be written."""


class SwapError(TightKVError):
    """Blocks that cannot be moved to the swap space or back; the engine computes them anew."""


class RequestError(TightKVError, ValueError):
    """One request is wrong; the others go on."""


class InvalidSamplingParamsError(RequestError):
    """A sampling parameter is outside its range."""


class PromptTooLongError(RequestError):
    """A prompt that can never fit."""


class KernelError(TightKVError, RuntimeError):
    """No kernel can do what was asked, or its tensors have the wrong shape or type."""


class EngineError(TightKVError, RuntimeError):
    """The engine failed while it ran."""


class IntegrityError(EngineError):
    """What is noted about blocks and sequences contradicts itself; the engine must not go on."""
