"""Other job queues to measure beside ours.

`catalogue` says which there are, `install` puts them under `build/peers`, and `adapters` has one small program for each
library, all with the same verbs (`adapters/protocol.py` tells them). `memory` is apart: what `redis_memory` needs.
`python -m benchmarks.peers smoke [NAME ...]` tries every verb of every peer with tiny numbers.
"""

from benchmarks.peers.install import PeerMissingError
from benchmarks.peers.memory import PEERS, Peer

__all__ = ["PEERS", "Peer", "PeerMissingError"]
