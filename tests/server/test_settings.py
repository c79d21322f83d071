import re
from pathlib import Path

import pytest

from engine.options import EngineOptions
from server.configuration import ConfigurationError, example_toml, resolve, to_toml
from server.daemon import engine_options
from server.settings import NOT_BUILT_KEYS, Settings, all_keys

ROOT = Path(__file__).parents[2]
SECRET = "sk-very-secret"


def resolve_sources(tmp_path, *, flags=None, environ=None, toml=None):
    file = None
    if toml is not None:
        file = tmp_path / "config.toml"
        file.write_text(toml, encoding="utf-8")
    return resolve(flags, config_file=file, environ=environ or {})


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "port", "origin"),
    [
        ({"server.port": "1"}, {"DALSEGNO_SERVER_PORT": "2"}, "[server]\nport = 3", 1, "flag --port"),
        ({}, {"DALSEGNO_SERVER_PORT": "2"}, "[server]\nport = 3", 2, "env DALSEGNO_SERVER_PORT"),
        ({}, {}, "[server]\nport = 3", 3, "file "),
        ({}, {}, "", 8000, "default"),
        ({}, {"OTHER_PORT": "2"}, None, 8000, "default"),
    ],
)
def test_the_nearest_source_wins_and_is_named(tmp_path, flags, environ, toml, port, origin):
    resolved = resolve_sources(tmp_path, flags=flags, environ=environ, toml=toml)
    assert resolved.settings.server.port == port
    assert resolved.origins["server.port"].startswith(origin)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"flags": {"server.port": "abc"}}, "server.port is 'abc' (flag --port); expected an integer from 0 to 65535"),
        ({"flags": {"server.port": "65536"}}, "server.port is '65536' (flag --port)"),
        ({"environ": {"DALSEGNO_ENGINE_BACKEND": "cuda"}}, "engine.backend is 'cuda' (env DALSEGNO_ENGINE_BACKEND)"),
        ({"environ": {"DALSEGNO_ENGINE_PENDING_TIMEOUT_S": "nan"}}, "engine.pending_timeout_s is 'nan'"),
        ({"toml": "[server]\nport = '8000'"}, "server.port is '8000' (file "),
        ({"toml": "[server]\nport = true"}, "server.port is True (file "),
        ({"toml": "[cache]\npage_size = 0"}, "expected an integer, 1 or more, or auto"),
        ({"toml": "[cache]\nkv_pages = 'many'"}, "cache.kv_pages is 'many'"),
        (
            {"flags": {"engine.activations": "fp8"}},
            "engine.activations is 'fp8' (flag --activations); expected auto, bf16",
        ),
        ({"flags": {"cache.kv_cache_dtype": "fp4"}}, "cache.kv_cache_dtype is 'fp4' (flag --kv-cache-dtype)"),
        ({"toml": "[cache]\ndevice_state_slots = 'all'"}, "expected an integer, 0 or more, or auto"),
        ({"toml": "[cache]\nhost_state_slots = 0"}, "expected an integer, 1 or more, or none"),
        ({"environ": {"DALSEGNO_CACHE_HOST_CACHE_MIB": "-1"}}, "expected an integer number of MiB, 0 or more, or auto"),
        ({"toml": "[server]\nprot = 1"}, "unknown key 'server.prot'; the nearest is 'server.port'"),
        ({"toml": "port = 1"}, "unknown key 'port'; the nearest is 'server.port'"),
        ({"toml": "[sever]\nport = 1"}, "unknown key 'sever'; the nearest is '[server]'"),
        ({"toml": "server = 1"}, "server must be a table"),
        ({"toml": "[server"}, "is not TOML"),
        ({"environ": {"DALSEGNO_SERVER_PROT": "1"}}, "the nearest is 'DALSEGNO_SERVER_PORT'"),
        ({"environ": {"DALSEGNO_PORT": "1"}}, "the nearest is 'DALSEGNO_SERVER_PORT'"),
        ({"environ": {"DALSEGNO_CACHE_DISK_CACHE": "x"}}, "DALSEGNO_CACHE_DISK_CACHE is not built yet"),
        ({"toml": "[ops]\nthroughput_interval_s = 0.0"}, "expected a number of seconds above 0"),
        ({"environ": {"DALSEGNO_OPS_EVENT_LOG": ""}}, "expected a file, or none"),
        ({"flags": {"cache.kv_pages": "8", "cache.kv_cache_mib": "8"}}, "give one of the two"),
        ({"flags": {"server.api_keys": ["@/no/such/file"]}}, "the file /no/such/file cannot be read"),
    ],
)
def test_a_bad_value_names_the_key_the_value_the_origin_and_what_is_expected(tmp_path, sources, said):
    with pytest.raises(ConfigurationError) as caught:
        resolve_sources(tmp_path, **sources)
    assert said in str(caught.value)


@pytest.mark.parametrize("key", sorted(NOT_BUILT_KEYS))
def test_a_key_that_has_no_effect_yet_is_refused_by_name(tmp_path, key):
    section, name = key.split(".")
    with pytest.raises(ConfigurationError, match=f"{key} is not built yet"):
        resolve_sources(tmp_path, toml=f"[{section}]\n{name} = 1")


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, content):
    file = tmp_path / "config.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"--config .*config.toml"):
        resolve(config_file=file, environ={})


@pytest.mark.parametrize("key", [key for key in all_keys() if "integer" in key.expected], ids=lambda key: key.dotted)
def test_the_least_value_of_every_count_is_one_that_the_engine_takes(key):
    least = int(re.search(r"\d+", key.expected)[0])
    engine_options(resolve({key.dotted: str(least)}, environ={}).settings)
    with pytest.raises(ConfigurationError):
        resolve({key.dotted: str(least - 1)}, environ={})


def test_the_example_file_is_the_schema_with_its_defaults():
    assert (ROOT / "config.example.toml").read_text(encoding="utf-8") == example_toml()


def test_the_example_file_resolves_to_the_defaults():
    assert resolve(config_file=ROOT / "config.example.toml", environ={}).settings == Settings()


def test_every_key_can_be_read_back_from_the_printed_configuration(tmp_path):
    flags = {"server.host": 'a"b\\c', "engine.max_context": "77", "engine.pending_timeout_s": "0.5"}
    settings = resolve(flags, environ={}).settings
    printed = to_toml(settings, {key.dotted: "" for key in all_keys()})
    assert resolve_sources(tmp_path, toml=printed).settings == settings


def test_defaults_are_those_of_the_engine():
    assert engine_options(Settings()) == EngineOptions()


@pytest.mark.parametrize(
    "sources",
    [
        {"flags": {"server.api_keys": ["a", "b"]}},
        {"environ": {"DALSEGNO_SERVER_API_KEYS": "a, b"}},
        {"toml": "[server]\napi_keys = ['a', 'b']"},
    ],
)
def test_api_keys_come_from_every_source(tmp_path, sources):
    keys = resolve_sources(tmp_path, **sources).settings.server.api_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]


def test_api_keys_come_from_a_file_with_one_key_per_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\na\n\n  b  \n", encoding="utf-8")
    keys = resolve({"server.api_keys": [f"@{file}", "c"]}, environ={}).settings.server.api_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b", "c"]


def test_the_admin_key_comes_from_a_file_with_that_key_alone(tmp_path):
    file = tmp_path / "key"
    file.write_text("# ours\na\n", encoding="utf-8")
    settings = resolve({"server.admin_key": f"@{file}"}, environ={}).settings
    assert settings.server.admin_key.get_secret_value() == "a"
    file.write_text("a\nb\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="holds 2 keys; expected one"):
        resolve({"server.admin_key": f"@{file}"}, environ={})


def test_keys_are_never_shown(tmp_path):
    settings = resolve({"server.api_keys": [SECRET], "server.admin_key": f"{SECRET}!"}, environ={}).settings
    assert SECRET not in to_toml(settings, {key.dotted: "" for key in all_keys()})
    assert SECRET not in repr(settings)
    with pytest.raises(ConfigurationError) as caught:
        resolve_sources(tmp_path, toml=f"[server]\napi_keys = ['{SECRET}', 1]")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        ({}, True),
        ({"flags": {"cache.prefix_reuse": "false"}}, False),
        ({"environ": {"DALSEGNO_CACHE_PREFIX_REUSE": "false"}}, False),
        ({"toml": "[cache]\nprefix_reuse = false"}, False),
    ],
)
def test_reuse_is_on_unless_it_is_switched_off(tmp_path, sources, kept):
    assert engine_options(resolve_sources(tmp_path, **sources).settings).prefix_reuse is kept


@pytest.mark.parametrize(
    ("name", "given", "option", "expected"),
    [
        ("cache.self_heal", "false", "self_heal", False),
        ("cache.host_cache_mib", "0", "host_cache_mib", 0),
        ("cache.host_cache_mib", "auto", "host_cache_mib", None),
        ("cache.host_state_slots", "7", "host_state_slots", 7),
        ("cache.host_state_slots", "none", "host_state_slots", None),
        ("cache.device_state_slots", "0", "device_state_slots", 0),
        ("cache.device_state_slots", "auto", "device_state_slots", None),
        ("cache.kv_cache_dtype", "fp8", "kv_cache_dtype", "fp8"),
        ("engine.activations", "fp4", "activations", "fp4"),
        ("engine.backend", "flashinfer", "backend", "flashinfer"),
    ],
)
def test_a_setting_reaches_the_engine(name, given, option, expected):
    assert getattr(engine_options(resolve({name: given}, environ={}).settings), option) == expected


@pytest.mark.parametrize(
    "sources",
    [
        {"flags": {"ops.event_log": "/var/log/events.jsonl", "ops.throughput_interval_s": "0.5"}},
        {
            "environ": {
                "DALSEGNO_OPS_EVENT_LOG": "/var/log/events.jsonl",
                "DALSEGNO_OPS_THROUGHPUT_INTERVAL_S": "0.5",
            }
        },
        {"toml": "[ops]\nevent_log = '/var/log/events.jsonl'\nthroughput_interval_s = 0.5"},
    ],
)
def test_where_events_go_and_how_often_throughput_is_told_come_from_every_source(tmp_path, sources):
    ops = resolve_sources(tmp_path, **sources).settings.ops
    assert (ops.event_log, ops.throughput_interval_s) == ("/var/log/events.jsonl", 0.5)
