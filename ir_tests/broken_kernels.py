"""Kernel entries that a compile check has to survive."""

import os


def aborts_on_wide_tiles(call, config, launch):
    if config.block_n > 16:
        os.abort()


def raises(call, config, launch):
    raise RuntimeError("no such instruction\nsecond line")
