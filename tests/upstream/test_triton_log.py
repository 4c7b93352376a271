from __future__ import annotations

import logging

import pytest

from draftgate.backend.logs import log_to_server
from draftgate.errors import ErrorCode
from draftgate.upstream.triton_log import ENGINE_LOG, TritonLog

I = "I1129 13:15:30.532678 10424 model_lifecycle.cc:777] "  # noqa: E741
E = "E1129 13:15:30.752789 10424 model_lifecycle.cc:642] "
TRACEBACK = "\\n\\nAt:\\n  /repository/engine/1/model.py(4): initialize\\n"


def failure(*lines: str, exit_status: int | None = 1) -> tuple[ErrorCode, str]:
    log = TritonLog()
    log.feed("".join(line + "\n" for line in lines))
    error = log.failure(exit_status=exit_status)
    return error.code, error.message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [
                I + '"loading: engine:1"',
                E + f"\"failed to load 'engine' version 1: Internal: KeyError: 'x'{TRACEBACK}\"",
                "error: creating server: Internal - failed to load all models",
            ],
            "cannot load model 'engine': Internal: KeyError: 'x'",
        ),
        (
            [E + "\"failed to start GRPC service: Socket '127.0.0.1:8' already in use \""],
            "cannot listen on 127.0.0.1:8: the port is in use, choose another one",
        ),
        (
            [
                "tritonserver: error while loading shared libraries: libx.so.1: "
                "cannot open shared object file: No such file or directory"
            ],
            "a library is missing: libx.so.1: cannot open shared object file: "
            "No such file or directory",
        ),
        (
            [I + "starting", "guardian: tritonserver was ended by signal 9"],
            "tritonserver was killed (signal 9), most likely for lack of memory",
        ),
        (
            [I + "serving", "guardian: tritonserver was ended by signal 11"],
            "tritonserver was ended by signal 11",
        ),
        ([I + "serving", "guardian: a model's process died"], "a model's process died"),
        ([E + '"first"', E + '"last"', "| table |"], "last"),
        (["what", ""], "tritonserver ended with status 1: what"),
        ([], "tritonserver ended with status 1: no output"),
    ],
)
def test_finds_the_decisive_line(lines: list[str], message: str) -> None:
    assert failure(*lines) == (ErrorCode.UNAVAILABLE, message)


def test_a_model_own_error_keeps_its_code() -> None:
    told = "TritonModelException: [draftgate:FAILED_PRECONDITION:] no such checkpoint"
    assert failure(E + f"\"failed to load 'engine' version 1: Internal: {told}{TRACEBACK}\"") == (
        ErrorCode.FAILED_PRECONDITION,
        "no such checkpoint",
    )


def test_a_model_s_own_log_keeps_its_level() -> None:
    """A warning is no failure; an error is the better word than tritonserver's."""
    assert failure("draftgate WARNING: odd", "what") == (
        ErrorCode.UNAVAILABLE,
        "tritonserver ended with status 1: what",
    )
    assert failure("draftgate ERROR: the step failed", I + "bye") == (
        ErrorCode.UNAVAILABLE,
        "the step failed",
    )


def test_lines_may_come_in_any_pieces_and_are_bounded() -> None:
    log = TritonLog()
    assert log.feed("one\ntw") == ["one"]
    assert log.feed("o\nthree") == ["two"]
    log.feed("x" * 100_000)
    assert len(log.feed("\n")[0]) == 2000
    log.feed("y\n" * 10_000)
    assert set(log.lines) == {"y"}
    assert len(log.lines) == 500


def test_lines_are_logged_with_their_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "draftgate.tritonserver")
    harmless = 'E1129 13:15:30.175181 1 server.cc:241] "CudaDriverHelper has not been initialized."'
    TritonLog().feed(f'{I}"info"\n{E}"bad"\n{harmless}\nplain\n| table |\n')
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "info"),
        ("ERROR", "bad"),
        ("DEBUG", "CudaDriverHelper has not been initialized."),
        ("INFO", "plain"),
        ("DEBUG", "| table |"),
    ]


def test_what_a_model_logs_is_logged_again(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the model's process, through its error stream, with the same words and level."""
    logger = logging.getLogger("draftgate")
    handlers, level = list(logger.handlers), logger.level
    try:
        logger.handlers.clear()
        log_to_server()
        log_to_server()
        theirs = logging.getLogger("draftgate.engine.engine")
        theirs.debug("not this")
        theirs.info("measured in %.1f s", 7.31)
        theirs.warning("odd: draftgate INFO: x")
    finally:
        logger.handlers[:], logger.level = handlers, level
    caplog.clear()
    caplog.set_level(logging.DEBUG)
    TritonLog().feed(capsys.readouterr().err)
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        (ENGINE_LOG, "INFO", "measured in 7.3 s"),
        (ENGINE_LOG, "WARNING", "odd: draftgate INFO: x"),
    ]
