"""Expert-parallel load balancing: where experts live. numpy only, usable alone."""

from eplb.placement import LayerExperts, LayerPlacement, Placement, round_robin

__all__ = ["LayerExperts", "LayerPlacement", "Placement", "round_robin"]
