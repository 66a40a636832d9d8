"""The bytes of the swap space: a file without a name, or pinned memory of the host."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Protocol

import torch

from tightkv.errors import ConfigError, SwapError

__all__ = ["GIB", "PinnedMemory", "SwapFile", "SwapMemory", "open_swap_memory"]

GIB = 2**30


class SwapMemory(Protocol):
    """Rows of equal length, addressed by the number of the first one.

    Attributes:
        num_bytes: of all rows.
        place: where they are, for the log.
    """

    num_bytes: int
    place: str

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Keep rows, uint8 `[num_rows, row_bytes]`; SwapError if that fails."""

    def read(self, first: int, rows: torch.Tensor) -> None:
        """Fill rows with what was kept; SwapError if that fails, or if it is not the same."""


class SwapFile:
    """Rows in a file that has no name, so that it goes with the process however that ends.

    It is read and written, not mapped: a disk that fails is an exception then, where a mapping
    would end the process by SIGBUS. Either way the bytes lie in the system's page cache.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Reserve the bytes on the disk.

        Raises:
            ConfigError: if the folder cannot be used, or has not so much room.
        """
        self.num_bytes = num_bytes
        self.place = f"a file without a name in {folder}"
        self._checksums: dict[int, int] = {}
        _make_folder(folder)
        try:
            self._check_room(folder)
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"swap_dir {folder} cannot be written to ({error.strerror}): choose another."
            ) from error
        self._descriptor = file.fileno()
        self.close = weakref.finalize(self, file.close)
        try:
            _reserve(self._descriptor, num_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"swap_space is {num_bytes / GIB:g} GiB, but swap_dir {folder} cannot give it "
                f"({error.strerror}): lower it, or choose another folder."
            ) from error

    def write(self, first: int, rows: torch.Tensor) -> None:
        offset, left = first * rows.shape[1], rows.numpy().data.cast("B")
        try:
            while left:
                written = os.pwrite(self._descriptor, left, offset)
                offset, left = offset + written, left[written:]
        except OSError as error:
            raise SwapError(f"the swap file cannot be written ({error.strerror})") from error
        for index, row in enumerate(rows.numpy(), start=first):
            self._checksums[index] = zlib.adler32(row)

    def read(self, first: int, rows: torch.Tensor) -> None:
        # A disk that lost a page in silence would change answers in silence: hence the checksums.
        offset, left = first * rows.shape[1], rows.numpy().data.cast("B")
        try:
            while left:
                count = os.preadv(self._descriptor, [left], offset)
                if count == 0:
                    raise SwapError("the swap file has become shorter")
                offset, left = offset + count, left[count:]
        except OSError as error:
            raise SwapError(f"the swap file cannot be read ({error.strerror})") from error
        for index, row in enumerate(rows.numpy(), start=first):
            if self._checksums.get(index) != zlib.adler32(row):
                raise SwapError("the swap file does not hold what was written to it")

    def _check_room(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        if self.num_bytes > free:
            raise ConfigError(
                f"swap_space is {self.num_bytes / GIB:g} GiB, but the file system of swap_dir "
                f"{folder} has {free / GIB:.2f} GiB free: lower it, or choose another folder."
            )


class PinnedMemory:
    """Rows in memory of the host that a device can copy from and to."""

    place = "pinned host memory"

    def __init__(self, num_bytes: int, pin_memory: bool = True) -> None:
        """Take the memory.

        Args:
            num_bytes: wanted.
            pin_memory: False where torch has no device that pins it (tests).

        Raises:
            ConfigError: if it cannot be had.
        """
        self.num_bytes = num_bytes
        try:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        except RuntimeError as error:
            raise ConfigError(
                f"swap_space is {num_bytes / GIB:g} GiB, which could not be had as pinned memory: "
                "lower it."
            ) from error

    def write(self, first: int, rows: torch.Tensor) -> None:
        self._rows(first, rows).copy_(rows)

    def read(self, first: int, rows: torch.Tensor) -> None:
        rows.copy_(self._rows(first, rows))

    def _rows(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        start = first * rows.shape[1]
        return self._memory[start : start + rows.numel()].view(rows.shape)


def open_swap_memory(
    num_bytes: int, folder: str | None, device: torch.device, available: int | None
) -> SwapMemory:
    """A file on a CPU, pinned memory for another device.

    Args:
        num_bytes: wanted.
        folder: for the file; None: the system's folder of temporary files.
        device: where the blocks are that will be swapped.
        available: bytes of memory that this process may still take; None: not known.

    Raises:
        ConfigError: if it cannot be had; says how much could.
    """
    path = Path(folder or tempfile.gettempdir())
    in_memory = device.type != "cpu" or _is_memory(path)
    if in_memory and available is not None and num_bytes > available:
        where = "host memory" if device.type != "cpu" else f"memory, for {path} is a tmpfs,"
        raise ConfigError(
            f"swap_space is {num_bytes / GIB:g} GiB of {where} and {available / GIB:.2f} GiB are "
            "available: lower it."
        )
    return SwapFile(path, num_bytes) if device.type == "cpu" else PinnedMemory(num_bytes)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"swap_dir {folder} is no folder and cannot be made ({error.strerror}): choose another."
        ) from error


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Have the file system set the bytes apart, so that a full disk shows now."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        for offset in range(0, num_bytes, 2**20):
            os.pwrite(descriptor, bytes(min(2**20, num_bytes - offset)), offset)


def _is_memory(folder: Path) -> bool:
    """Whether files of this folder, or of the one it would be made in, take memory (tmpfs)."""
    place = folder if os.path.exists(folder) else folder.parent
    mounts = Path("/proc/self/mountinfo")
    if not os.path.exists(place) or not mounts.is_file():
        return False
    device = place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounted = [line.split(" - ") for line in mounts.read_text().splitlines()]
    return any(
        before.split()[2] == number and after.split()[0] in ("tmpfs", "ramfs")
        for before, after in mounted
    )
