"""Index arithmetic for ragged batches, where each request owns a run of consecutive tokens."""

from __future__ import annotations

import numpy as np


def rows_and_offsets(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which row each token belongs to, and where in its row it stands.

    Args:
        lengths: int [num_rows], tokens of each row, not negative.

    Returns:
        (row, offset), both int64 [sum(lengths)]: lengths [2, 0, 1] give [0, 0, 2] and [0, 1, 0].
    """
    num_rows = lengths.shape[0]
    rows = np.repeat(np.arange(num_rows), lengths)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    return rows, np.arange(rows.shape[0]) - starts[rows]
