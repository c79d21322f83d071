"""What to keep when only so many states fit: others' rules and a bound, each a small file behind one protocol."""

from bench.policies.aligned import BlockAligned
from bench.policies.clairvoyant import Clairvoyant
from bench.policies.dalsegno import Dalsegno
from bench.policies.lru import Lru
from bench.policies.marconi import Marconi
from bench.policies.protocol import Policy
from bench.policies.radix_lru import RadixLru

__all__ = ["BlockAligned", "Clairvoyant", "Dalsegno", "Lru", "Marconi", "Policy", "RadixLru"]
