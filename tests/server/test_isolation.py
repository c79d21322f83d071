"""Who shares remembered prompts: nobody across salts, nor across API keys where these are kept apart."""

import itertools
import logging

import pytest

from server.app import create_app
from server.configuration import ConfigurationError, resolve
from server.isolation import Isolation
from server.schema.sampling import MAX_SALT_CHARACTERS
from server.settings import ServerSettings, Settings
from tests.server.conftest import client_of

CHAT = {"messages": [{"role": "user", "content": "Count the ships in the harbour, please. " * 4}], "max_tokens": 1}
TEXT = {"prompt": "Count the ships in the harbour, please. " * 4, "max_tokens": 1}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
KEYS = ("alpha-key", "beta-key")

pytestmark = pytest.mark.anyio


def scope(key_number=None):
    return {"state": {} if key_number is None else {"key_number": key_number}}


async def cached(client, path, salt=None, key=None) -> int:
    body = BODIES[path] if salt is None else BODIES[path] | {"cache_salt": salt}
    answer = await client.post(path, json=body, headers={} if key is None else {"x-api-key": key})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module", params=BODIES)
def path(request):
    return request.param


async def test_a_salt_shares_with_itself_and_with_nobody_else(client, path):
    salts = [f"{path} {name}" for name in ("one", "two")]
    assert await cached(client, path, salts[0]) == 0
    assert await cached(client, path, salts[1]) == 0
    assert await cached(client, path, salts[0]) > 0
    assert await cached(client, path, salts[1]) > 0


async def test_a_salt_does_not_share_with_those_without_one(client, path):
    await cached(client, path)
    assert await cached(client, path) > 0
    assert await cached(client, path, f"{path} three") == 0


@pytest.mark.parametrize("salt", ["", 5, ["a"], "s" * (MAX_SALT_CHARACTERS + 1)])
async def test_what_is_no_salt_is_refused_by_name(client, path, salt):
    refused = await client.post(path, json=BODIES[path] | {"cache_salt": salt})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


async def test_no_salt_may_be_said_aloud(client, path):
    assert await cached(client, path, None) == await cached(client, path, None)
    answer = await client.post(path, json=BODIES[path] | {"cache_salt": None})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.fixture(params=["shared", "auto"])
async def keyed(request, settings):
    """A client of a daemon with two keys, and whether these are kept apart."""
    server = settings.server.model_copy(update=ServerSettings(api_keys=KEYS).model_dump(include={"api_keys"}))
    cache = settings.cache.model_copy(update={"cache_isolation": request.param})
    app = create_app(settings.model_copy(update={"server": server, "cache": cache}))
    await app.state.daemon.start()
    async with client_of(app) as client:
        yield client, request.param == "auto"
    await app.state.daemon.stop()


async def test_keys_share_unless_they_are_kept_apart(keyed, caplog, path):
    client, is_apart = keyed
    caplog.set_level(logging.DEBUG)
    assert await cached(client, path, key=KEYS[0]) == 0
    assert (await cached(client, path, key=KEYS[1]) == 0) is is_apart
    assert await cached(client, path, key=KEYS[0]) > 0
    assert await cached(client, path, "salt-water", KEYS[0]) == 0
    assert (await cached(client, path, "salt-water", KEYS[1]) == 0) is is_apart
    for secret in (*KEYS, "salt-water"):
        assert secret not in caplog.text


@pytest.mark.parametrize("is_by_key", [False, True])
def test_namespaces_are_as_many_as_there_are_who_may_share(is_by_key):
    isolation = Isolation(is_by_key=is_by_key)
    salts, numbers = [None, "a", "b", "0:salt a", "1", "\ud800"], [None, 0, 1, 10]
    names = [isolation.namespace(scope(number), salt) for number, salt in itertools.product(numbers, salts)]
    assert len(set(names)) == len(salts) * (len(numbers) if is_by_key else 1)
    assert isolation.namespace(scope(), None) == ""
    assert names == [isolation.namespace(scope(number), salt) for number, salt in itertools.product(numbers, salts)]


def test_a_namespace_does_not_give_its_salt_away():
    salt = "the secret is 17"
    names = {Isolation(is_by_key=True).namespace(scope(1), salt) for _ in range(3)}
    assert len(names) == 3, "each process has a secret of its own, so that nobody can try salts"
    assert all(salt not in name for name in names)


@pytest.mark.parametrize(
    ("keys", "isolation", "is_apart"),
    [
        ((), "auto", False),
        (("a",), "auto", False),
        (("a", "a"), "auto", False),
        (("a", "b"), "auto", True),
        (("a", "b"), "shared", False),
        (("a",), "key", True),
    ],
)
def test_two_keys_are_kept_apart_by_default(keys, isolation, is_apart):
    given = {"server.api_keys": list(keys), "cache.cache_isolation": isolation}
    assert resolve(given, environ={}).settings.isolates_keys is is_apart
    assert Settings().cache.cache_isolation == "auto"


def test_keys_that_do_not_exist_cannot_be_kept_apart():
    with pytest.raises(
        ConfigurationError, match=r"cache_isolation is key \(flag --cache-isolation\).*api_keys has none"
    ):
        resolve({"cache.cache_isolation": "key"}, environ={})
    assert resolve({"cache.cache_isolation": "key", "server.api_keys": ["k"]}, environ={}).settings
