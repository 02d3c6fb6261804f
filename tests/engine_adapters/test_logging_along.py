"""What kvfs logs inside an engine is seen, however and whenever that has configured its own logger."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import logging.config, sys
from kvfs.engine_adapters.keeping import warn_together
from kvfs.engine_adapters.logging_along import log_with

def configure(level="INFO", disable=False):
    '''As vLLM does it: a logger of its own name, which does not propagate.'''
    logging.config.dictConfig({
        "version": 1, "disable_existing_loggers": disable,
        "formatters": {"engine": {"format": "(engine) %(levelname)s %(message)s"}},
        "handlers": {"engine": {"class": "logging.StreamHandler", "formatter": "engine", "stream": "ext://sys.stdout"}},
        "loggers": {"engine": {"handlers": ["engine"], "level": level, "propagate": False}},
    })
"""
SAY = "warn_together(['', 'no kvfs is mounted at /nowhere', 'another reason'])\n"
SENTENCE = "kvfs: going on without a cache until there is one: no kvfs is mounted at /nowhere\n"


def run(script: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", START + script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "before",
    [
        "configure(); log_with('engine')\n",
        "log_with('engine'); configure()\n",
        "configure(); log_with('engine'); configure('WARNING')\n",
        "configure(disable=True); log_with('engine')\n",
        "configure(); log_with('engine'); log_with('engine')\n",
    ],
    ids=["before", "after", "again", "others disabled", "two connectors"],
)
def test_the_sentence_is_in_the_engine_s_log_once(before: str) -> None:
    assert run(before + SAY) == (f"(engine) WARNING {SENTENCE}", "")


def test_an_engine_that_configures_nothing_has_it_on_stderr() -> None:
    assert run("log_with('engine')\n" + SAY) == ("", SENTENCE)


def test_an_engine_that_wants_errors_only_has_none() -> None:
    assert run("configure('ERROR'); log_with('engine')\n" + SAY) == ("", "")


def test_information_is_logged_where_the_engine_logs_it() -> None:
    script = "configure({level!r}); log_with('engine'); logging.getLogger('kvfs.x').info('told')\n"
    assert run(script.format(level="INFO"))[0] == "(engine) INFO told\n"
    assert run(script.format(level="WARNING"))[0] == ""


def test_handlers_that_somebody_gave_to_kvfs_stay() -> None:
    script = (
        "logging.getLogger('kvfs').addHandler(logging.StreamHandler(sys.stdout)); configure(); log_with('engine')\n"
    )
    assert run(script + SAY) == (SENTENCE, "")
