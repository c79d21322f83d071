"""Command lines as they are written for other servers: what means the same is done, the rest is told what to do."""

import pytest
import typer.main

from server.cli import run
from server.commands.foreign_flags import HINTS
from server.verbs import app

pytestmark = pytest.mark.usefixtures("quiet_logging")

MEANS_THE_SAME = [
    # vLLM
    (
        "--model /m --max-model-len 4096 --max-num-seqs 4 --served-model-name a --block-size 32",
        "/m",
        4096,
        4,
        ["a"],
        32,
    ),
    # SGLang
    ("--model-path /m --context-length 4096 --max-running-requests 4 --page-size 32", "/m", 4096, 4, [], 32),
    # llama.cpp
    ("-m /m -c 4096 -np 4 -a a --alias b", "/m", 4096, 4, ["a", "b"], "auto"),
    ("/m --ctx-size=4096 --parallel 4 --served-model-name a -a b", "/m", 4096, 4, ["a", "b"], "auto"),
]


@pytest.mark.parametrize(("line", "model", "context", "concurrency", "names", "page"), MEANS_THE_SAME)
def test_a_flag_that_means_the_same_is_an_alias(capsys, line, model, context, concurrency, names, page):
    assert run(["config", *line.split()]) == 0
    printed = capsys.readouterr().out
    shown = [repr(name).replace("'", '"') for name in names]
    for expected in (
        f'model = "{model}"',
        f"max_context = {context}",
        f"max_concurrency = {concurrency}",
        f"served_model_names = [{', '.join(shown)}]",
        f"page_size = {page}" if page != "auto" else 'page_size = "auto"',
    ):
        assert f"\n{expected}\n" in printed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--disable-radix-cache", "prefix_reuse = false"),
        ("--no-enable-prefix-caching", "prefix_reuse = false"),
        ("--no-prefix-reuse --disable-radix-cache", "prefix_reuse = false"),
        ("--any-model", "any_model = true"),
        ("--chunked-prefill-size 64", "prefill_chunk = 64"),
        ("--max-queued-requests 3", "max_pending_requests = 3"),
        ("-n 32", "default_max_tokens = 32"),
        ("--cache-ram 100", "host_cache_mib = 100"),
        ("--num-gpu-blocks-override 9", "kv_pages = 9"),
    ],
)
def test_other_flags_that_mean_the_same(capsys, line, expected):
    assert run(["config", *line.split()]) == 0
    assert f"\n{expected}\n" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--max-context 5 -c 5", "demo --model demo"])
def test_one_thing_by_two_names_is_refused(capsys, line):
    assert run(["config", *line.split()]) == 2
    assert "was given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpu-memory-utilization 0.9", "--kv-cache-mib"),
        ("--mem-fraction-static=0.9", "--kv-cache-mib"),
        ("--enable-prefix-caching", "--no-prefix-reuse"),
        ("--tensor-parallel-size 2", "one device"),
        ("--max-num-batched-tokens 2048", "--prefill-chunk"),
        ("--swap-space 4", "--host-cache-mib"),
        ("-ngl 99", "one device"),
        ("-t 8", "OMP_NUM_THREADS"),
        ("--trust-remote-code", "leave it out"),
        ("--api-key-file keys", "--api-key @FILE"),
    ],
)
def test_a_flag_without_a_counterpart_says_what_to_do(capsys, line, said):
    assert run(["serve", *line.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith(f"dalsegno: {line.split()[0].partition('=')[0]} is a flag of ")


def commands(group, place=""):
    for name, command in group.commands.items():
        yield from commands(command, f"{place}{name} ") if hasattr(command, "commands") else [(place + name, command)]


def test_no_verb_has_a_flag_that_is_refused_and_none_has_one_twice():
    for name, command in commands(typer.main.get_command(app)):
        flags = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
        assert set(flags) & set(HINTS) == set(), name
        assert len(set(flags)) == len(flags), name
