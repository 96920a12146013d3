"""A private Redis Cluster: several servers that share the slots."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Self

from tests.servers.redis import RedisRefusedError, RedisServer, fields, wait_for_replica
from tests.servers.server import STARTUP_SECONDS, ServerFailedError, free_port

SLOTS = 16_384
BUS_OFFSET = 10_000  # where a node without `cluster-port` puts its bus


class RedisClusterNode(RedisServer):
    """One node. It keeps its name, its slots and its knowledge of the others through a crash, but no data without AOF.

    A master that is down for longer than a node timeout (2 s here) is replaced by its replica, if it has one.
    """

    name = "redis-node"

    def __init__(self, *, settings: Mapping[str, str] | None = None, startup_seconds: float = STARTUP_SECONDS) -> None:
        super().__init__(settings=settings, startup_seconds=startup_seconds)
        self.bus_port = 0
        self._bus_is_free_to_choose = redis_version(self._binary) >= (7, 0)

    def _choose_port(self) -> None:
        if not self._bus_is_free_to_choose:
            self.port = free_port(also=BUS_OFFSET)
            self.bus_port = self.port + BUS_OFFSET
            return
        super()._choose_port()
        self.bus_port = self.port
        while self.bus_port == self.port:
            self.bus_port = free_port()

    def _own_settings(self) -> dict[str, str]:
        settings = {
            **super()._own_settings(),
            "cluster-enabled": "yes",
            "cluster-announce-ip": "127.0.0.1",
            "cluster-node-timeout": "2000",
        }
        if self._bus_is_free_to_choose:
            settings["cluster-port"] = str(self.bus_port)
        return settings

    def _worth_retrying(self, log: str) -> bool:
        # The second: a killed node's children still hold the lock on nodes.conf.
        return super()._worth_retrying(log) or "already used by a different" in log


class RedisCluster:
    """A private cluster: `with RedisCluster() as cluster: connect(cluster.url)`.

    It starts in little more than the two seconds that a node lets pass before it says that the cluster is whole.

    The slots are shared evenly among the masters; each has `replicas` replicas. `nodes` are the servers, the masters
    first, each to be killed and started by itself; `wait` returns when the others have settled that. `settings` are
    those of every node.
    """

    def __init__(
        self,
        masters: int = 3,
        replicas: int = 0,
        *,
        settings: Mapping[str, str] | None = None,
        startup_seconds: float = STARTUP_SECONDS,
    ) -> None:
        self.startup_seconds = startup_seconds
        self._masters = masters
        self._is_cluster = False
        self.nodes = [
            RedisClusterNode(settings=settings, startup_seconds=startup_seconds)
            for _ in range(masters * (1 + replicas))
        ]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where clients connect: all nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start the nodes that are not running and return when every node says that the cluster is whole."""
        for node in self.nodes:
            if not node.running:
                node.start()
        if not self._is_cluster:
            self._share_slots()
            self._introduce()
            self._follow()
            self._is_cluster = True
        self.wait(self.startup_seconds)

    def close(self) -> None:
        """Stop all nodes and remove their folders."""
        for node in self.nodes:
            node.close()
        self._is_cluster = False

    def wait(self, seconds: float = 15.0) -> None:
        """Return when the nodes that are running agree that they have all slots, and on who is whose replica."""
        self._until(self._whole, seconds)

    def owner(self, key: str) -> RedisClusterNode:
        """The node that has the slot of this key now."""
        seen_by = next(node for node in self.nodes if node.running)
        slot = seen_by.ask("CLUSTER", "KEYSLOT", key)
        for first, last, master, *_ in seen_by.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == master[1])
        raise RuntimeError(f"nobody has the slot of {key!r}")

    # How it becomes a cluster.

    def _share_slots(self) -> None:
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # all different, so that there is nothing to settle
            if number < self._masters:
                first, end = (SLOTS * place // self._masters for place in (number, number + 1))
                node.ask("CLUSTER", "ADDSLOTS", *range(first, end))

    def _introduce(self) -> None:
        for one, other in permutations(self.nodes, 2):
            one.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)

    def _follow(self) -> None:
        for number, replica in enumerate(self.nodes[self._masters :]):
            master = self.nodes[number % self._masters]
            master_id = master.ask("CLUSTER", "MYID")
            self._until(partial(self._replicates, replica, master_id), self.startup_seconds)
            wait_for_replica(master, replica, self.startup_seconds)

    def _replicates(self, replica: RedisClusterNode, master_id: str) -> bool:
        try:
            replica.ask("CLUSTER", "REPLICATE", master_id)
        except RedisRefusedError as refused:
            if "Unknown node" in str(refused):
                return False  # they have not met yet
            raise
        return True

    def _whole(self) -> bool:
        running = {node.port for node in self.nodes if node.running}
        return all(self._whole_to(node, running) for node in self.nodes if node.running)

    def _whole_to(self, node: RedisClusterNode, running: set[int]) -> bool:
        if fields(node.ask("CLUSTER", "INFO"))["cluster_state"] != "ok":
            return False
        lines = node.ask("CLUSTER", "NODES").splitlines()
        for line in lines:
            _, address, flags, _, _, _, _, link, *slots = line.split()
            if "handshake" in flags:
                return False
            port = int(re.split("[:@]", address)[1])
            if port not in running and slots:
                return False
            if port in running and ("fail" in flags or link != "connected" or ("master" in flags and not slots)):
                return False
        return len(lines) == len(self.nodes)

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                views = "\n\n".join(str(node.ask("CLUSTER", "NODES")) for node in self.nodes if node.running)
                raise ServerFailedError(f"the cluster is not whole after {seconds:g} s; its nodes see:\n{views}")
            time.sleep(0.02)


def redis_version(binary: Path) -> tuple[int, ...]:
    """What the program says of itself: "Redis server v=7.0.15 ..."."""
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    found = re.search(r"\bv=(\d+)\.(\d+)", words)
    if found is None:
        raise ServerFailedError(f"{binary} does not tell its version: {words}")
    return tuple(int(part) for part in found.groups())
