"""What is remembered: pools of KV pages and state slots, and the leases that hold them.

Pure Python: no torch, no asyncio, no input or output; time comes in as an argument. The cache decides, the engine
copies.
"""

from cache.pools import Holder, Lease, Pool, PoolCounts, PoolExhaustedError, UnitState

__all__ = ["Holder", "Lease", "Pool", "PoolCounts", "PoolExhaustedError", "UnitState"]
