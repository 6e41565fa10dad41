"""``python -m tcport``."""

from tcport.cli import app

app(prog_name="python -m tcport")
