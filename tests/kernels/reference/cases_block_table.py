"""The kernels that follow block tables, and the one that clears blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_comparison import CPU, Results, compare, distinct, ints, prefix_sums
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cp_utils import prepare_dcp_local_seq_lens
from vllm.v1.worker.utils import KVBlockZeroer

from vllm_handoff.worker.cpu_kernels.block_table import compute_slot_mappings

MAX_REQS, MAX_TOKENS = 10, 48
KERNELS = (
    "buffer_utils._apply_write_kernel",
    "block_table._gather_block_tables_kernel",
    "block_table._compute_slot_mappings_kernel",
)


@pytest.mark.parametrize("block_sizes", [[16], [16, 8]], ids=str)
@pytest.mark.parametrize("lengths", [[1] * 6, [5, 1, 9, 1], [2, 0, 3]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_block_tables(block_sizes: list[int], lengths: list[int], masked: bool) -> None:
    """Staged writes, gathering with padding rows, and slots; with dummy rows and a disabled group."""
    num_groups, num_reqs, num_blocks = len(block_sizes), len(lengths), 12

    def scenario(rng: np.random.Generator) -> Results:
        tables = BlockTables(
            block_sizes,
            MAX_REQS,
            MAX_TOKENS,
            [num_blocks] * num_groups,
            CPU,
            slot_mapping_enabled=[True, not masked][:num_groups],
        )
        for _ in range(2):
            for req in range(MAX_REQS):
                new_blocks = tuple(rng.integers(1, 99, rng.integers(1, 6)).tolist() for _ in block_sizes)
                tables.append_block_ids(req, new_blocks, overwrite=False)
            tables.apply_staged_writes()
        for table in tables.input_block_tables:
            table.fill_(7)
        tables.slot_mappings.fill_(7)
        idx_mapping = distinct(rng, num_reqs, MAX_REQS)
        query_start_loc = prefix_sums(lengths, MAX_REQS + 1)
        positions = ints(rng, 0, 64, MAX_TOKENS, dtype=torch.int64)
        gathered = tables.gather_block_tables(idx_mapping, num_reqs + 2)
        if masked:
            idx_mapping[::2] = -1
        slots = tables.compute_slot_mappings(idx_mapping, query_start_loc, positions, MAX_TOKENS)
        results = {f"gathered {i}": table.clone() for i, table in enumerate(gathered)}
        results |= {f"tables {i}": table.gpu.clone() for i, table in enumerate(tables.block_tables)}
        return results | {"slots": slots.clone(), "beyond padding": tables.input_block_tables[0].clone()}

    for seed in range(2):
        compare(scenario, *KERNELS, seed=seed)


def test_slots_under_context_parallelism() -> None:
    """Against plain Python: the interpreter cannot negate the kernel's bool flag."""
    rng = np.random.default_rng(0)
    block_size, cp_size, cp_rank, interleave, num_tokens = 8, 2, 1, 4, 9
    tables = [ints(rng, 1, 99, MAX_REQS, 12) for _ in range(2)]
    idx_mapping, lengths = torch.tensor([3, -1, 0]), [4, 2, 3]
    positions = ints(rng, 0, 90, MAX_TOKENS, dtype=torch.int64)
    slots = torch.full((2, MAX_TOKENS), 7, dtype=torch.int64)
    compute_slot_mappings(
        MAX_TOKENS,
        idx_mapping,
        prefix_sums(lengths),
        positions,
        torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64),
        torch.tensor([12, 12]),
        torch.tensor([block_size, block_size], dtype=torch.int32),
        torch.tensor([True, True]),
        torch.tensor([True, False]),
        slots,
        MAX_TOKENS,
        cp_rank,
        CP_SIZE=cp_size,
        CP_INTERLEAVE=interleave,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=1024,
    )
    reqs = np.repeat(idx_mapping.numpy(), lengths).tolist()
    for group, sharded in enumerate([True, False]):
        expected = [-1] * MAX_TOKENS
        # Which tokens of a sharded cache this rank holds, in order: every second run of four.
        mine = [p for p in range(200) if p // interleave % cp_size == cp_rank]
        for token in range(num_tokens):
            req, position = reqs[token], int(positions[token])
            if req < 0 or (sharded and position not in mine):
                continue
            local = mine.index(position) if sharded else position
            expected[token] = int(tables[group][req, local // block_size]) * block_size + local % block_size
        assert slots[group].tolist() == expected


def test_slots_without_any_token() -> None:
    def scenario(rng: np.random.Generator) -> Results:
        tables = BlockTables([16], MAX_REQS, MAX_TOKENS, [4], CPU)
        none = torch.empty(0, dtype=torch.int64)
        slots = tables.compute_slot_mappings(none, torch.zeros(1, dtype=torch.int32), none, MAX_TOKENS)
        tables.input_block_tables[0].fill_(3)
        gathered = tables.gather_block_tables(none, 2)[0]
        return {"slots": slots.clone(), "gathered": gathered.clone()}

    compare(scenario, *KERNELS[1:])


@pytest.mark.parametrize("num_reqs", [0, 1, 10])
def test_dcp_local_seq_lens(num_reqs: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        out = ints(rng, 0, 9, MAX_REQS)
        prepare_dcp_local_seq_lens(out, ints(rng, 0, 99, MAX_REQS), num_reqs, 3, 1, 4)
        return {"out": out}

    compare(scenario, "cp_utils._dcp_local_seq_lens_kernel")


def test_zero_kv_blocks() -> None:
    def scenario(rng: np.random.Generator) -> Results:
        caches = [ints(rng, 1, 9, 6, 20), ints(rng, 1, 9, 6, 8)]
        zeroer = KVBlockZeroer.__new__(KVBlockZeroer)
        zeroer.device = CPU
        zeroer._meta = (
            torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64),
            torch.tensor([20, 8], dtype=torch.int64),
            # The first cache's blocks are cleared but for their last four elements.
            torch.tensor([16, 8], dtype=torch.int64),
            1,
            16,
            2,
        )
        zeroer.zero_block_ids([1, 4])
        return {"0": caches[0], "1": caches[1]}

    compare(scenario, "vllm.v1.worker.utils._zero_kv_blocks_kernel")
