"""Tiles that fit a device, ranked by what they cost."""

from tcport.tiling.optimizer import Ranking, rank_tiles

__all__ = ["Ranking", "rank_tiles"]
