"""The page pool of the example: every page has one owner or none, and the scratch page has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_pool import SCRATCH_PAGE, PagePool, new_caches


@given(num_pages=st.integers(2, 40), data=st.data())
def test_pages_have_one_owner(num_pages: int, data: st.DataObject) -> None:
    pool = PagePool(num_pages, 4)
    owned: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        held = sum(map(len, owned))
        if owned and data.draw(st.booleans()):
            pool.free(owned.pop(data.draw(st.integers(0, len(owned) - 1))))
        else:
            count = data.draw(st.integers(0, num_pages))
            if count > num_pages - 1 - held:
                with pytest.raises(MemoryError):
                    pool.allocate(count)
            else:
                owned.append(pool.allocate(count))
        pages = [page for group in owned for page in group]
        assert len(set(pages)) == len(pages)
        assert set(pages) <= set(range(num_pages)) - {SCRATCH_PAGE}
        assert pool.num_free == num_pages - 1 - len(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_a_page_given_back_twice_is_refused_and_nothing_changes() -> None:
    pool = PagePool(6, 4)
    first = pool.allocate(2)
    second = pool.allocate(1)
    pool.free(first)
    for pages in (first, [*second, first[0]], [*second, *second], [SCRATCH_PAGE], [99]):
        with pytest.raises(ValueError, match="given back"):
            pool.free(pages)
    assert pool.num_free == 4
    pool.free(second)
    assert pool.num_free == 5


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_pool_too_small_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="scratch page"):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize(("layout", "strides"), [("page-major", (120, 15, 5, 1)), ("head-major", (120, 5, 40, 1))])
def test_layouts(layout: str, strides: tuple[int, ...]) -> None:
    caches = new_caches(2, 6, 8, 3, 5, layout=layout, dtype=torch.float16)
    tensors = [tensor for pair in caches for tensor in pair]
    assert len(tensors) == 4
    assert {t.shape for t in tensors} == {torch.Size([6, 8, 3, 5])}
    assert {t.stride() for t in tensors} == {strides}
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 4
    assert all((t == 0).all() for t in tensors)
