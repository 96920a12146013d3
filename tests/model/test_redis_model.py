"""Redis behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from holdfast.job import NewJob
from holdfast.ports import Ports
from holdfast.store import Checkpoint, DepthLimit, Inserted, Store
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis import scripts as redis_scripts
from holdfast.stores.redis.dispatch import Verb
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault
from tests.redis.acl import add_users, url_of
from tests.redis.helpers import empty, outside, store_at, with_clock
from tests.servers import RedisCluster, RedisServer

T = TypeVar("T")

NAMESPACE = "model"
EXAMPLES = 60


class SteeredStore(RedisStore):
    """A store whose scripts go by the test's clock."""

    shown: int | None = None

    def _set_clock(self) -> None:
        now = self._ports.clock.now()
        if now != self.shown:
            self.shown = now
            with_clock(self, f"local now = {now}\n")

    async def _run(self, verb: Verb[T]) -> T:
        self._set_clock()
        return await super()._run(verb)

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        self._set_clock()  # the short way of one job does not pass `_run`
        return await super().insert(jobs, limits=limits, checkpoint=checkpoint, fresh=fresh)

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        self._set_clock()
        return super().insert_blocking(jobs, limits=limits, fresh=fresh)


class RedisModel(StoreModel):
    url: ClassVar[str]
    direct: ClassVar[str]

    def open_store(self, folder: Path, ports: Ports) -> Store:
        empty(self.direct, NAMESPACE)
        outside(self.direct).script_flush()  # each moment had scripts of its own
        plain = store_at(f"{self.url}?namespace={NAMESPACE}", ports=ports)
        return SteeredStore(*plain._arguments, **plain._options)  # type: ignore[arg-type]


@pytest.fixture
def model(redis_server: RedisServer) -> type[RedisModel]:
    RedisModel.url = RedisModel.direct = redis_server.url
    return RedisModel


def test_redis_agrees_with_memory(model: type[RedisModel]) -> None:
    agrees_with_memory(model, examples=EXAMPLES)


def test_a_cluster_agrees_with_memory(redis_cluster: RedisCluster) -> None:
    RedisModel.url = RedisModel.direct = redis_cluster.url
    agrees_with_memory(RedisModel, examples=EXAMPLES // 2)


def test_a_user_with_the_least_rights_sees_the_same(redis_server: RedisServer) -> None:
    add_users(redis_server, NAMESPACE)
    RedisModel.url, RedisModel.direct = url_of(redis_server, "holdfast-worker"), redis_server.url
    agrees_with_memory(RedisModel, examples=EXAMPLES // 2)


# Negative controls: with a guard of a script taken out, the comparison fails.

CONTROLS: dict[str, tuple[str, str, str]] = {
    "no_token": (
        "apply",
        "own and string.find(m.sources, r.state, 1, true) and r.version == m.version",
        "string.find(m.sources, r.state, 1, true)",
    ),
    "closed_sessions_may_settle": ("apply", "following == 0 and is_open(m.session) then", "following == 0 then"),
    "closed_sessions_may_claim": ("claim", "if redis.call('HGET', parts, session) ~= '1'", "if false"),
    "keys_are_never_freed": ("moves", "m.key == 'free'", "false"),
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
