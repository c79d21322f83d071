import contextlib
import io
import json
import logging
import os

import pytest
import structlog

from ops.log import configure_logging


@pytest.fixture(autouse=True)
def _restored_logging():
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", "dalsegno", "uvicorn")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()


def logged(level="info", log_format="json"):
    stream = io.StringIO()
    configure_logging(level, log_format, stream)
    return stream


def test_a_log_that_nobody_reads_is_told_once_on_the_other_output(capsys):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    configure_logging("info", "json", stream)
    for _ in range(3):
        logging.getLogger("dalsegno.part").info("lost")
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    out, err = capsys.readouterr()
    assert (out.splitlines(), err) == (["the log cannot be written (Broken pipe); the process goes on without"], "")


def test_both_kinds_of_logger_write_one_json_object_a_line():
    stream = logged()
    logging.getLogger("dalsegno.part").info("loaded %d", 3)
    structlog.get_logger("dalsegno.other").warning("full", pool="kv")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["logger"], first["level"]) == ("loaded 3", "dalsegno.part", "info")
    assert (second["event"], second["pool"], second["level"]) == ("full", "kv", "warning")
    assert first["timestamp"].endswith("Z")


def test_a_stream_that_is_no_terminal_gets_json_by_default():
    stream = logged(log_format="auto")
    logging.getLogger("dalsegno").info("x")
    assert json.loads(stream.getvalue())["event"] == "x"


def test_console_lines_are_for_people():
    stream = logged(log_format="console")
    logging.getLogger("dalsegno").info("hello")
    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_less_severe_messages_than_the_level_are_left_out(level, expected):
    stream = logged(level)
    for severity in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("dalsegno.part"), severity)("x")
    assert len(stream.getvalue().splitlines()) == expected


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_the_text_of_an_exception_is_kept_for_debug(log_format):
    for level, is_shown in (("info", False), ("debug", True)):
        stream = logged(level, log_format)
        try:
            raise ZeroDivisionError("the secret is 17")
        except ZeroDivisionError as error:
            logging.getLogger("dalsegno").error("failed", exc_info=error)
            structlog.get_logger("dalsegno").error("failed", exc_info=True)
        assert ("the secret is 17" in stream.getvalue()) is is_shown
        assert stream.getvalue().count("ZeroDivisionError") >= 2
        assert "test_log.py" in stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variable(log_format):
    stream = logged("debug", log_format)
    prompt = "".join(["the ", "secret ", "is 17"])
    try:
        len(prompt) / 0
    except ZeroDivisionError:
        logging.getLogger("dalsegno").exception("failed")
    assert "ZeroDivisionError" in stream.getvalue()
    assert prompt not in stream.getvalue()
