"""Tiles that fit a device, ranked by what they cost."""

from tcport.tiling.optimizer import Ranking, TileLayoutOptimizer, rank_tiles
from tcport.tiling.writes import rank_write_tiles

__all__ = ["Ranking", "TileLayoutOptimizer", "rank_tiles", "rank_write_tiles"]
