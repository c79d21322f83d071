"""docs/cuda.md says what is chosen on each GPU: held to what the code chooses with the flashinfer that is installed."""

import re

import pytest

from bench.gpu.shapes import HYBRID_27B
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.library import dsl_trouble, load_library
from engine.kernels.flashinfer.support import choose
from engine.kernels.linear.preview import preview_linear
from server.settings import all_keys
from tests.deploy.containers import ROOT

TEXT = (ROOT / "docs/cuda.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEAD = next(row for row in ROWS if row[0] == "kernel")
TABLE = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == len(HEAD) and not set(row[0]) <= {"-"}}
COLUMNS = {
    (int(number[:-1]), int(number[-1])): place
    for place, title in enumerate(HEAD[1:])
    for number in re.findall(r"SM(\d+)", title)
}


@pytest.fixture(scope="module")
def chosen():
    """What serves each kernel, by capability."""
    library = load_library()
    found = {}
    for capability in COLUMNS:
        traits = DeviceTraits("a GPU", capability, 2**37, 100)
        support = choose(traits, HYBRID_27B, cuda_version="13.0", dsl_trouble=dsl_trouble(traits))
        choices = [*support.choices, *preview_linear(traits, "auto", library)]
        found[capability] = {choice.kernel: choice.implementation for choice in choices}
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what flashinfer's imports say of each other
@pytest.mark.parametrize("capability", COLUMNS, ids=lambda capability: f"sm{capability[0]}{capability[1]}")
def test_the_table_says_what_is_chosen(chosen, capability):
    told = {kernel: cells[COLUMNS[capability]].strip("`") for kernel, cells in TABLE.items() if kernel != "kernel"}
    served = chosen[capability]
    assert told.keys() <= served.keys()
    wrong = {kernel: served[kernel] for kernel, cell in told.items() if not served[kernel].startswith(cell)}
    assert wrong == {}


def test_every_flag_that_it_names_is_one_that_serve_or_inspect_has():
    known = {key.flag for key in all_keys()} | {"--device", "--gpu", "--json", "--gpus", "--force-reinstall"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - known == set()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_its_links_lead_somewhere(path):
    assert (ROOT / "docs" / path).exists()
