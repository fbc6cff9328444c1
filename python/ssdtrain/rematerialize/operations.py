"""The operations that a recipe can repeat, by the names of their nodes.

A row stands here only if the node tells all that decides the bits of its result: ``x + 1`` is
missing, because no node keeps the 1.
"""

from __future__ import annotations

from ssdtrain.rematerialize.operation import Table
from ssdtrain.rematerialize.pointwise import POINTWISE
from ssdtrain.rematerialize.products import PRODUCTS
from ssdtrain.rematerialize.rows import ROWS
from ssdtrain.rematerialize.shapes import SHAPES

__all__ = ["OPERATIONS"]

OPERATIONS: Table = {**POINTWISE, **SHAPES, **ROWS, **PRODUCTS}
