"""The compose file: valid by the specification's schema, and held to what else is shipped."""

import re
import subprocess
import sys

import pytest
import yaml

from server.settings import ServerSettings
from tests.deploy.containers import COMPOSE, ROOT, read_stages, services
from tests.deploy.prometheus_files import DEPLOY, PROMETHEUS, load
from tests.programs import needs_program

SERVICES = services()
DAEMONS = {name: service for name, service in SERVICES.items() if "build" in service}
OTHERS = {name: service for name, service in SERVICES.items() if "build" not in service}
SCRAPED = load(DEPLOY / "compose" / "prometheus.yml")
DATASOURCE = load(DEPLOY / "compose" / "grafana-datasource.yml")


def valid(path):
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*checker, path], capture_output=True, text=True, check=False)


def test_it_is_valid_by_the_compose_specification():
    result = valid(COMPOSE)
    assert result.returncode == 0, result.stdout


def test_the_schema_is_one_that_refuses(tmp_path):
    wrong = load(COMPOSE)
    wrong["services"]["grafana"]["prots"] = ["3000:3000"]
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump(wrong))
    assert "prots" in valid(path).stdout


def test_there_is_a_daemon_for_each_target_and_one_profile_starts_one():
    targets = {name: service["build"]["target"] for name, service in DAEMONS.items()}
    assert targets.items() >= {("dalsegno-cpu", "cpu"), ("dalsegno-gpu", "cuda")}
    assert set(targets.values()) <= set(read_stages())
    assert sorted(service["profiles"] for service in DAEMONS.values()) == [["cpu"], ["gpu"]]
    for service in DAEMONS.values():
        assert (COMPOSE.parent / service["build"]["context"]).resolve() == ROOT


def test_only_the_daemon_with_a_gpu_asks_for_one():
    asking = {name for name, service in SERVICES.items() if "gpu" in str(service.get("deploy", ""))}
    assert asking == {"dalsegno-gpu"}


@pytest.mark.parametrize("name", OTHERS)
def test_every_image_that_is_pulled_is_pinned_and_says_when_it_is_ready(name):
    assert re.search(r":v?\d+\.\d+\.\d+$", OTHERS[name]["image"])
    assert OTHERS[name]["healthcheck"]["test"][0] == "CMD"


def mounts():
    """Each bind mount of a file or folder of the repository: source and the service that has it."""
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                yield name, source


@pytest.mark.parametrize(("name", "source"), list(mounts()))
def test_what_is_mounted_is_there(name, source):
    assert (COMPOSE.parent / source).exists()


def test_every_other_volume_is_declared():
    declared = set(load(COMPOSE)["volumes"])
    named = {volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    named = {name for name in named if name.isidentifier()} | {"models"}
    assert named == declared


def test_everything_is_published_on_this_machine_only():
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_the_daemon_under_the_name_that_it_has_there():
    [job] = SCRAPED["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert int(port) == ServerSettings().port
    for service in DAEMONS.values():
        assert host in service["networks"]["default"]["aliases"]


def test_but_for_that_name_its_configuration_is_the_one_that_is_shipped():
    shipped = load(PROMETHEUS / "prometheus.yml")
    [job] = shipped["scrape_configs"]
    job["static_configs"] = SCRAPED["scrape_configs"][0]["static_configs"]
    assert shipped == SCRAPED


def test_prometheus_takes_it(tmp_path):
    promtool = needs_program("promtool", package="prometheus")
    (tmp_path / "rules").symlink_to(PROMETHEUS / "rules")
    path = tmp_path / "prometheus.yml"
    path.write_bytes((DEPLOY / "compose" / "prometheus.yml").read_bytes())
    result = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_grafana_asks_the_prometheus_that_is_there_and_nothing_else_differs():
    shipped = load(DEPLOY / "grafana" / "provisioning" / "datasources" / "dalsegno.yml")
    [source] = shipped["datasources"]
    [port] = [port.split(":")[-1] for port in SERVICES["prometheus"]["ports"]]
    source["url"] = f"http://prometheus:{port}"
    assert shipped == DATASOURCE


def test_grafana_finds_the_board_where_its_provider_looks():
    [provider] = load(DEPLOY / "grafana" / "provisioning" / "dashboards" / "dalsegno.yml")["providers"]
    targets = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert targets["./grafana/dashboards"] == provider["options"]["path"]


def test_no_password_is_written_down():
    text = COMPOSE.read_text(encoding="utf-8")
    assert re.findall(r"(?i)(?:password|api_key|admin_key|token)\w*[:=]\s*(?!\$\{)\S+", text) == []
