"""KV blocks of decoding requests: nothing is worked out for a token that changes nothing about them."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

# Managers whose requests need a block for every `block_size` tokens and nothing between.
_PLAIN = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager)


def skip_where_there_is_room(manager: KVCacheManager) -> bool:
    """Answer at once where a request's blocks have room for its next token. False if the KV is not so simple.

    Why: vLLM 0.32 works out for every request of every round how many blocks it
    needs, and which have become full. Both answers are "none" for 15 of 16
    decoded tokens, and with hundreds of requests they take more than a quarter
    of the engine's time.
    How: two methods of this object are wrapped, and whatever the short answer
    is not sure of goes to the original.
    Where: all KV is of attention, over everything or within windows. Recurrent states, for instance, have rules of
    their own.
    What differs: a block that became full is entered in the prefix cache when
    its last token is collected, not when the next one is planned. So it is for asynchronous
    schedulers, which enter blocks there too.
    Can go: once vLLM's methods begin with these questions.
    """
    groups = manager.coordinator.single_type_managers
    if not groups or any(type(group) not in _PLAIN for group in groups):
        return False
    allocate, cache, nothing = manager.allocate_slots, manager.cache_blocks, manager.empty_kv_cache_blocks
    tables = [
        (
            group.req_to_blocks,
            group.block_size,
            None if type(group) is FullAttentionManager else group.get_num_skipped_tokens,
        )
        for group in groups
    ]
    cached_of = [(group.num_cached_block, group.block_size) for group in groups]

    def allocate_slots(
        request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **others: Any
    ) -> KVCacheBlocks | None:
        if args or others or request.is_prefill_chunk:
            return allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **others)
        needed = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        for blocks_of, block_size, skipped in tables:
            blocks = blocks_of.get(request.request_id, ())
            room = len(blocks) * block_size >= needed
            if room and skipped is not None:
                # What the window has left is freed from its end on, so the last of it tells.
                left = skipped(request.num_computed_tokens - request.num_in_flight_tokens) // block_size
                room = not left or blocks[min(left, len(blocks)) - 1].is_null
            if not room:
                return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
        return nothing

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        for cached, block_size in cached_of:
            if num_computed_tokens // block_size > cached.get(request.request_id, 0):
                return cache(request, num_computed_tokens)
        return None

    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]
    # With hashes of fewer tokens than a block has, ends of prompts that do not fill a block are entered as well.
    if manager.enable_caching and all(group.block_size == manager.block_pool.hash_block_size for group in groups):
        manager.cache_blocks = cache_blocks  # type: ignore[method-assign]
    return True
