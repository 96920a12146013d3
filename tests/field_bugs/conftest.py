"""Places on every engine. Scenes that several tests look at are played once, on all their engines at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.field_bugs.places")

from tests.field_bugs.places import MakePlace, Place  # noqa: E402


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakePlace]:
    """Makes places, for scenes that a whole module looks at."""
    places = MakePlace(request, tmp_path_factory)
    yield places
    places.close()


@pytest.fixture
def place(engine: str, places: MakePlace) -> Iterator[Place]:
    """A place of the engine that the test is marked with."""
    with places.of(engine).opened() as place:
        yield place
