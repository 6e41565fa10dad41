"""Loggers of tcport by topic; ``TCPORT_LOGS=chain`` (topics separated by commas) prints a topic to stderr."""

from __future__ import annotations

import functools
import logging
import os
import sys


@functools.cache
def logger(topic: str) -> logging.Logger:
    """The logger ``tcport.<topic>``.

    Warnings reach whatever the program has set up, or stderr. What is merely informative is printed only where
    ``TCPORT_LOGS`` names the topic, or the program asks for it.
    """
    log = logging.getLogger(f"tcport.{topic}")
    if topic in os.environ.get("TCPORT_LOGS", "").replace(" ", "").split(","):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log
