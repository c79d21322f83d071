"""By which names the model is served."""

import pytest

from server.app import create_app
from server.daemon import model_names
from server.settings import ServerSettings, Settings
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("demo",)),
        ({"model": "org/name"}, ("org/name",)),
        ({"served_model_names": ("a", "b")}, ("a", "b")),
        ({"model_name": "own", "served_model_names": ("a", "own")}, ("own", "a")),
    ],
)
def test_the_first_name_is_the_public_id(settings, names):
    assert model_names(Settings(server=ServerSettings(**settings))) == names


def test_a_folder_is_called_by_its_last_part(tiny_model):
    assert model_names(Settings(server=ServerSettings(model=f"{tiny_model}/"))) == ("tiny",)


@pytest.mark.anyio
async def test_each_name_is_listed_and_answered_and_any_other_where_it_may_be(settings):
    server = settings.server.model_copy(update={"served_model_names": ("gpt-4o", "local")})
    daemon = create_app(settings.model_copy(update={"server": server})).state.daemon
    for name in ("gpt-4o", "local", None):
        daemon.check_model(name)
    app = create_app(settings.model_copy(update={"server": server.model_copy(update={"any_model": True})}))
    await app.state.daemon.start()
    async with client_of(app) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["gpt-4o", "local"]
        assert (await client.get("/v1/models/local")).json()["id"] == "local"
        answer = await client.post(CHAT, json=HELLO | {"model": "claude-opus"})
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt-4o")
    await app.state.daemon.stop()
