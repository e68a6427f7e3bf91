"""Everything that a block manager knows, as one value to compare."""

from typing import Any

from octavo.blockmgr import BlockManager


def full_state(manager: BlockManager) -> tuple[Any, ...]:
    """A value that differs whenever a later call could behave differently."""
    pool, tables, index, growth = manager._pool, manager._tables, manager._index, manager._growth
    return (
        tables.table_SM.tobytes(),
        tables.num_blocks_S.tobytes(),
        sorted(tables.owners.items()),
        sorted(tables._free),
        pool.ref_P.tobytes(),
        pool.blank_blocks().tolist(),
        pool.lru.to_array().tolist(),
        pool.fence.to_array().tolist(),
        list(pool.fence._open),
        dict(index.block_of),
        index.entry_P.tobytes(),
        index.is_tainted_P.tobytes(),
        growth.copies.pending,
        growth.copies.sources,
        tables.updates._rows_U3[: tables.updates._count].tolist(),
        [(slot, chain.digests, chain.entries, chain.is_tainted) for slot, chain in sorted(_copies(manager).items())],
        len(index.events._events),
        manager.num_queried_tokens,
        manager.num_hit_tokens,
        *_host_state(manager),
    )


def _host_state(manager: BlockManager) -> tuple[Any, ...]:
    host = manager.host
    return (
        host.pool.ref_P.tobytes(),
        host.pool.blank_blocks().tolist(),
        host.pool.lru.to_array().tolist(),
        host.pool.fence.to_array().tolist(),
        sorted(host.outs.items()),
        host.ins.pending,
        host.ins.sources,
        host.is_awaited_P.tobytes(),
        [(name, request.blocks.tolist(), request.num_tokens) for name, request in sorted(host.swapped.items())],
    )


def _copies(manager: BlockManager) -> dict[int, Any]:
    return {slot: chain.fork(len(chain)) for slot, chain in manager._chains.items()}
