"""Every query's own values, as a Parquet data set: one file an attention call and selection."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from probes.attention import AttentionCall
from probes.errors import ProbeError
from probes.scan import Outcome
from probes.selection import Selection


class RawWriter:
    """Writes the values of each query and head into a folder.

    The columns are `batch` and `sequence` (position of the sequence in its batch), `module`, `layer`, `head`, `query`
    (position), `selection`, and one for each metric that has one value a query.

    Args:
        folder: an empty or new folder.

    Raises:
        ProbeError: if there is something in it, or it can't be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if self._folder.is_dir() and any(self._folder.iterdir()):
            raise ProbeError(f"Expected a new folder for the raw values, but {self._folder} has something in it.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProbeError(f"Expected to make the folder {self._folder}, but got {error.strerror}.") from error
        self._files = 0

    def add(
        self, batch: int, call: AttentionCall, selection: Selection, outcome: Outcome, real: Tensor, rows: Tensor | None
    ) -> None:
        """Write one call's values under one selection.

        Args:
            batch: number of the batch.
            call: the call.
            selection: the selection.
            outcome: its statistics.
            real: (batch, query), the queries to write.
            rows: their positions; all where None.
        """
        positions = torch.arange(real.shape[1], device=real.device) if rows is None else rows
        sequence, place = real.nonzero(as_tuple=True)
        heads = call.shape[1]
        count = len(sequence)
        columns = {
            "batch": pa.array([batch] * (count * heads), pa.int64()),
            "sequence": pa.array(sequence.repeat_interleave(heads).cpu().numpy()),
            "module": pa.array([call.module_name] * (count * heads)).dictionary_encode(),
            "layer": pa.array([call.layer] * (count * heads), pa.int64()),
            "head": pa.array(torch.arange(heads).repeat(count).numpy()),
            "query": pa.array(positions[place].repeat_interleave(heads).cpu().numpy()),
            "selection": pa.array([selection.name] * (count * heads)).dictionary_encode(),
        }
        for name, values in outcome.queried.items():
            columns[name] = pa.array(values.transpose(1, 2)[real].flatten().cpu().numpy(), from_pandas=True)
        target = self._folder / f"part-{self._files:06d}.parquet"
        temporary = target.with_suffix(".part")
        pq.write_table(pa.table(columns), temporary)
        temporary.replace(target)
        self._files += 1
