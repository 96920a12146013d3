"""Redis behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from holdfast.job import NewJob
from holdfast.ports import Ports
from holdfast.store import DepthLimit, Inserted, Store
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis import scripts as redis_scripts
from holdfast.stores.redis.dispatch import Verb
from holdfast.stores.redis.topology import OneServer
from holdfast.stores.redis.wire import Access, Place
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault
from tests.redis.helpers import empty, outside, with_clock
from tests.servers import RedisServer

T = TypeVar("T")

NAMESPACE = "model"
EXAMPLES = 60
CLOCK = f"local now = tonumber(redis.call('GET', '{NAMESPACE}:clock'))\n"


class SteeredStore(RedisStore):
    """A store whose scripts go by the test's clock: a key of the server."""

    url: ClassVar[str]
    shown: int | None = None

    def _set_clock(self) -> None:
        now = self._ports.clock.now()
        if now != self.shown:
            self.shown = now
            outside(self.url).set(f"{NAMESPACE}:clock", now)

    async def _run(self, verb: Verb[T]) -> T:
        self._set_clock()
        return await super()._run(verb)

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        self._set_clock()
        return super().insert_blocking(jobs, limits=limits)


class RedisModel(StoreModel):
    port: ClassVar[int]

    def open_store(self, folder: Path, ports: Ports) -> Store:
        empty(SteeredStore.url, NAMESPACE)
        place = Place("127.0.0.1", self.port)
        return with_clock(SteeredStore(OneServer([place]), Access(), namespace=NAMESPACE, ports=ports), CLOCK)


@pytest.fixture(scope="module")
def model(redis_server: RedisServer) -> type[RedisModel]:
    SteeredStore.url = redis_server.url
    RedisModel.port = redis_server.port
    return RedisModel


def test_redis_agrees_with_memory(model: type[RedisModel]) -> None:
    agrees_with_memory(model, examples=EXAMPLES)


# Negative controls: with a guard of a script taken out, the comparison fails.

CONTROLS: dict[str, tuple[str, str, str]] = {
    "no_token": (
        "apply",
        "own and string.find(m.sources, r.state, 1, true) and tonumber(r.version) == m.version",
        "string.find(m.sources, r.state, 1, true)",
    ),
    "closed_sessions_may_claim": ("claim", "if redis.call('HGET', parts, session) ~= '1'", "if false"),
    "keys_are_never_freed": ("moves", "m.key == 'free'", "false"),
    "traces_are_claimed": ("claim", "if from_list or string.sub(row, 1, 6) ~= 'ready\\t' then return false end", ""),
}


@pytest.mark.parametrize(("piece", "guard", "instead"), CONTROLS.values(), ids=CONTROLS)
def test_the_comparison_notices(
    model: type[RedisModel], monkeypatch: pytest.MonkeyPatch, piece: str, guard: str, instead: str
) -> None:
    whole = redis_scripts._piece
    broken = whole(piece).replace(guard, instead)
    assert broken != whole(piece)

    monkeypatch.setattr(redis_scripts, "_piece", lambda name: broken if name == piece else whole(name))
    with pytest.raises(AssertionError):
        search_for_a_fault(model, examples=2 * EXAMPLES)
