from __future__ import annotations

import numpy as np
import pytest

from kvferry.engines.reference.rows import ROW_TILE, RowProducts, is_order_free


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


@pytest.mark.parametrize("shape", [(96, 64), (64, 192), (260, 64), (37, 50)])
def test_each_row_is_the_same_in_any_company(shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    products = RowProducts()
    products.prove(weight)
    x = matrix(300, shape[1], seed=1)
    alone = np.concatenate([products.multiply(x[i : i + 1], weight) for i in range(len(x))])
    for start, stop in ((0, 300), (0, 112), (3, 60), (5, 12), (100, 229), (17, 18), (0, 0)):
        together = products.multiply(x[start:stop], weight)
        assert together.tobytes() == alone[start:stop].tobytes()
    order = np.random.default_rng(2).permutation(300)
    assert products.multiply(x[order], weight).tobytes() == alone[order].tobytes()


def test_result_is_the_product() -> None:
    weight, x = matrix(40, 30), matrix(77, 30, seed=1)
    products = RowProducts()
    products.prove(weight)
    expected = x.astype(np.float64) @ weight.T
    np.testing.assert_allclose(products.multiply(x, weight), expected, atol=1e-4)


def test_shape_that_was_not_proved_is_multiplied_row_by_row() -> None:
    weight, x = matrix(40, 30), matrix(9, 30, seed=1)
    products = RowProducts()
    assert products.tiles(weight) == (1,)
    np.testing.assert_allclose(products.multiply(x, weight), x @ weight.T, atol=1e-4)


def test_widest_tile_comes_first_and_the_narrow_one_is_always_there() -> None:
    weight = matrix(64, 64)
    products = RowProducts()
    products.prove(weight)
    tiles = products.tiles(weight)
    assert tiles == tuple(sorted(tiles, reverse=True))
    assert tiles[-1] in (1, ROW_TILE)
    narrow = RowProducts()
    narrow.prove(weight, wide=False)
    assert len(narrow.tiles(weight)) == 1


def test_order_dependence_is_found() -> None:
    weight = matrix(12, 20).T

    def uneven(rows: np.ndarray) -> np.ndarray:
        out = rows @ weight
        out[5] = np.nextafter(out[5], np.float32(np.inf))
        return out

    assert not is_order_free(uneven, 20)
    assert is_order_free(lambda rows: rows * np.float32(3), 20)
