"""Steps of decodes, captured once per size and replayed: the host then launches one thing a step.

A captured step reads the same addresses at each replay, and its launches have the shapes of the
bucket. So what differs between steps lies in memory that stays: the integers in the staging
buffer, the marks of bad tokens, the logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy
import torch

from tightkv.engine.batch import BatchArrays, ForwardBatch, place_batch
from tightkv.engine.device_batch import DevicePlacement, bucket_sizes
from tightkv.errors import UnsupportedModelError
from tightkv.models import one_line

__all__ = ["DecodeGraphs", "Replay", "empty_decode"]

_logger = logging.getLogger("tightkv")

Replay = Callable[[], None]
"""Runs what was captured, on the memory that it was captured with."""


class Capturing(Protocol):
    """What captures."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run it, and note what it launches."""


class DecodeGraphs:
    """The captured steps, and the logits that they leave."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the logits; nothing is captured yet."""
        self._logits = torch.zeros(max_num_seqs, vocab_size, dtype=torch.float32, device=device)
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        placement: DevicePlacement,
        num_groups: int,
        device: Capturing,
    ) -> None:
        """Capture a step per bucket, and let steps be padded to them from now on.

        Args:
            forward: makes a step's logits.
            placement: of steps.
            num_groups: layer groups.
            device: captures.

        Raises:
            UnsupportedModelError: if the model does what cannot be captured.
        """
        begin = time.perf_counter()
        buckets = bucket_sizes(len(self._logits))
        # The largest first: the others then find room in the memory that it has taken.
        for bucket in reversed(buckets):
            arrays = placement.pad(empty_decode(num_groups), bucket)
            self._replays[bucket] = self._capture(forward, place_batch(arrays, placement), device)
        placement.buckets = buckets
        _logger.info(
            "Captured the decodes of %s sequences in %.1f s",
            ", ".join(map(str, buckets)),
            time.perf_counter() - begin,
        )

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the step that was placed; float32 logits `[bucket, vocab_size]`, until the next."""
        self._replays[bucket]()
        return self._logits[:bucket]

    def _capture(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        batch: ForwardBatch,
        device: Capturing,
    ) -> Replay:
        logits = self._logits[: batch.bucket]

        def run() -> None:
            logits.copy_(forward(batch))

        try:
            return device.capture(run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the code of a hundred architectures does on the host
            raise UnsupportedModelError(
                f"The decodes of this model cannot be captured in a graph ({one_line(error)}): "
                "start with --enforce-eager."
            ) from error


def empty_decode(num_groups: int) -> BatchArrays:
    """A step of no sequence."""
    ids = numpy.zeros(0, numpy.int64)
    return BatchArrays(
        input_ids=ids,
        positions=ids,
        slot_mappings=(ids,) * num_groups,
        seq_lens=ids.astype(numpy.int32),
        query_start_loc=numpy.zeros(1, numpy.int32),
        block_tables=(numpy.zeros((0, 1), numpy.int32),) * num_groups,
        logit_rows=ids,
        row_start_loc=numpy.zeros(1, numpy.int32),
        max_query_len=1,
    )
