"""What examples/compile_time.py says of its figures, and that it counts the work of the processes it starts."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from compile_time import BATCH, PROMPT, processor_seconds, sample_arguments, show


@pytest.mark.parametrize(
    ("ours", "said"), [(22.0, "1.10 of Inductor's, within 1.10"), (22.4, "1.12 of Inductor's, beyond")]
)
def test_the_verdict_is_on_processor_seconds(ours: float, said: str) -> None:
    out = io.StringIO()
    medians = {"inductor": {"clock": 30.0, "CPU": 20.0}, "tcport": {"clock": 60.0, "CPU": ours}}
    show(Console(file=out, width=100), medians)
    assert said in out.getvalue()
    assert "2.00" in out.getvalue()


def test_compilers_that_were_started_count() -> None:
    before = processor_seconds()
    code = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert processor_seconds() - before >= 0.2


def test_both_steps_get_arguments_of_their_own_sizes() -> None:
    steps = sample_arguments(torch.device("cpu"))
    assert steps["prefill"][0].shape == (1, PROMPT)
    assert [argument.shape[0] for argument in steps["decode"]] == [BATCH] * 3
