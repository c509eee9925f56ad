"""Matrix products whose rows do not depend on the company they keep.

A BLAS picks its kernels by the shape of a product, and kernels add up in different orders. The
same row can therefore come out with other last bits when it is multiplied together with 3
neighbours or with 30, and a token that was nearly a tie turns into another token. This module
fixes the shapes: rows are multiplied in tiles of ``ROW_TILE``, always, with zeros in the unused
rows. Each row of the result is then a function of that row alone.

Long prompts would pay for that, since every tile reads all weights. A wider tile is used where
it is proved, on this BLAS, for this weight's shape, to give the same bits as the narrow tile.
Kernels at the edge of a product differ from those inside, so a wide tile carries guard rows
on both ends that are thrown away.

What is promised holds for one machine and one BLAS build. Another processor type adds up in
another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ROW_TILE = 8
_GUARD_ROWS = 8
_WIDE_TILES = (128, 64)


def is_order_free(product: Callable[[Floats], Floats], columns: int) -> bool:
    """Whether ``product`` treats the ``ROW_TILE`` rows of its argument alike, bit for bit.

    product: maps float32[ROW_TILE, columns] to float32[ROW_TILE, n].
    """
    rows = _samples(ROW_TILE, columns)
    expected = product(rows)
    return all(
        np.array_equal(product(np.roll(rows, shift, axis=0)), np.roll(expected, shift, axis=0))
        for shift in (1, 3, 6)
    )


class RowProducts:
    """``x @ w.T`` for weights that were announced before, by row-independent arithmetic.

    Not bound to a thread. ``prove`` before ``multiply``; a shape that was not announced gets
    the slowest tile, which needs no proof: one row at a time.
    """

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, ...], int] = {}
        self._wide: dict[tuple[int, ...], tuple[int, ...]] = {}

    def prove(self, weight: Floats, *, wide: bool = True) -> None:
        """Find out which tiles are safe for weights of this shape. Runs a few products.

        weight: float32[n, k]. Its values do not matter, its shape does.
        wide: whether to try wide tiles; pass False where there are never many rows.
        """
        if weight.shape in self._tiles:
            return
        columns = weight.shape[1]
        if not is_order_free(lambda rows: _product(rows, weight), columns):
            self._tiles[weight.shape] = 1
            return
        self._tiles[weight.shape] = ROW_TILE
        if wide:
            self._wide[weight.shape] = tuple(
                width for width in _WIDE_TILES if self._is_wide_safe(weight, width)
            )

    def tiles(self, weight: Floats) -> tuple[int, ...]:
        """Tile heights that are in use for weights of this shape, widest first."""
        return (*self._wide.get(weight.shape, ()), self._tiles.get(weight.shape, 1))

    def multiply(self, x: Floats, weight: Floats) -> Floats:
        """``x @ weight.T``, each row of it independent of all other rows.

        x: float32[rows, k], C-contiguous, any number of rows.
        weight: float32[n, k], C-contiguous.
        Returns float32[rows, n], C-contiguous.
        """
        out = np.empty((len(x), weight.shape[0]), dtype=np.float32)
        for start, stop, height, first in self._cover(len(x), weight):
            tile = x[start:stop]
            if len(tile) != height:
                tile = np.zeros((height, x.shape[1]), dtype=np.float32)
                tile[first : first + stop - start] = x[start:stop]
            out[start:stop] = _product(tile, weight)[first : first + stop - start]
        return out

    def _cover(self, rows: int, weight: Floats) -> Iterator[tuple[int, int, int, int]]:
        """Tiles over ``rows``: (first row, end, height of the tile, guard rows in front).

        A wide tile is worth its price when more than half of it is used.
        """
        start = 0
        for width in self._wide.get(weight.shape, ()):
            useful = width - 2 * _GUARD_ROWS
            while rows - start > useful // 2:
                stop = min(rows, start + useful)
                yield start, stop, width, _GUARD_ROWS
                start = stop
        height = self._tiles.get(weight.shape, 1)
        while start < rows:
            stop = min(rows, start + height)
            yield start, stop, height, 0
            start = stop

    def _is_wide_safe(self, weight: Floats, width: int) -> bool:
        rows = _samples(width, weight.shape[1])
        inner = slice(_GUARD_ROWS, width - _GUARD_ROWS)
        expected = [_product(rows[at : at + ROW_TILE], weight) for at in range(0, width, ROW_TILE)]
        return np.array_equal(_product(rows, weight)[inner], np.concatenate(expected)[inner])


def _product(rows: Floats, weight: Floats) -> Floats:
    # The weight stands on the left. In this order OpenBLAS splits the work between threads along
    # the weight's rows, and the bits are the same with one thread and with two.
    product: Floats = np.matmul(weight, rows.T).T
    return product


def _samples(rows: int, columns: int) -> Floats:
    return np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
