"""docs/memory.md: its arithmetic is right, and its figures are those that `dalsegno inspect` prints."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import run
from tests.engine.sparse_checkpoint import write_sparse_27b
from tests.server.printed import printed_bytes

pytestmark = pytest.mark.usefixtures("quiet_logging")

DOC = Path(__file__).parents[2] / "docs" / "memory.md"
GPUS = {"RTX 5090": "rtx5090", "RTX PRO 6000": "rtxpro6000", "H200": "h200"}
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def rows_of(text: str) -> list[tuple[str, str, int]]:
    """Name, expression and result of each row of arithmetic."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([\d,]+) \|$", text, re.MULTILINE)
    return [(name, expression, int(result.replace(",", ""))) for name, expression, result in rows]


def worked_out(node: ast.AST) -> int:
    if isinstance(node, ast.Expression):
        return worked_out(node.body)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](worked_out(node.left), worked_out(node.right))
    assert isinstance(node, ast.Constant)
    assert type(node.value) is int
    return node.value


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_27b(tmp_path_factory.mktemp("models") / "27b")


@pytest.fixture
def plan(big_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "300")

    def printed(gpu: str) -> dict[str, int]:
        assert run(["inspect", str(big_model), "--gpu", gpu, "--ram", "128GiB"]) == 0
        return {name.strip(): size for name, size in printed_bytes(capsys.readouterr().out).items()}

    return printed


def test_each_expression_gives_its_result() -> None:
    rows = rows_of(DOC.read_text(encoding="utf-8"))
    assert len(rows) > 40
    for name, expression, result in rows:
        assert worked_out(ast.parse(expression, mode="eval")) == result, name


@pytest.mark.parametrize("title", GPUS)
def test_each_line_is_the_one_that_is_printed(plan, title: str) -> None:
    doc = DOC.read_text(encoding="utf-8")
    before, *chapters = re.split(r"^### .*$", doc, flags=re.MULTILINE)
    headings = re.findall(r"^### (.*)$", doc, flags=re.MULTILINE)
    chapter = next(text for heading, text in zip(headings, chapters, strict=True) if title in heading)
    loading = doc.partition("## Does loading fit?")[2]
    own = chapter.partition("\n## ")[0]
    by_hand = {name: result for text in (before, own, loading) for name, _, result in rows_of(text)}
    printed = plan(GPUS[title])
    assert printed.keys() - by_hand.keys() == {"RAM", "host cache"}
    assert {name: by_hand[name] for name in printed.keys() & by_hand.keys()} == {
        name: size for name, size in printed.items() if name in by_hand
    }


def test_the_tokens_and_the_checkpoints_that_are_told_are_those_of_the_tables() -> None:
    doc = DOC.read_text(encoding="utf-8")
    told = [int(tokens.replace(",", "")) for tokens in re.findall(r"([\d,]+) tokens of KV(?: and|, which)", doc)]
    pages = [result for name, _, result in rows_of(doc) if name == "*pages*"]
    assert told == [64 * count for count in pages]
