"""An order behaves as an ordered dict does, however few of its entries count as recent ones."""

from __future__ import annotations

from collections import OrderedDict
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.policies import order as module
from kvfs.policies.order import Order

_GONE = -1
KEYS = st.integers(0, 30)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "put", "to_end", "pop_first"]), KEYS, st.lists(KEYS)))


@pytest.mark.parametrize("num_recent", [0, 1, 3, 10])
@given(steps=STEPS)
def test_an_order_is_an_ordered_dict(num_recent: int, steps: list[tuple[str, int, list[int]]]) -> None:
    order: Order[int, int] = Order(_GONE)
    model: OrderedDict[int, int] = OrderedDict()
    with patch.object(module, "_RECENT", num_recent):
        for number, (what, key, keys) in enumerate(steps):
            if what == "add" and key not in model:
                order.add(key, number)
                model[key] = number
            elif what == "discard":
                assert order.discard(key) == (model.pop(key, None) is not None)
            elif what == "put" and key in model:
                order.put(key, number)
                model[key] = number
            elif what == "to_end":
                order.to_end(keys)
                for each in reversed(keys):
                    if each in model:
                        model.move_to_end(each)
            elif what == "pop_first" and model:
                order.pop_first()
                model.popitem(last=False)
            assert list(order.items()) == list(model.items())
    assert list(order) == list(model)
    assert list(reversed(order)) == list(reversed(model))
    assert len(order) == order.size == len(model)
    assert all((key in order) == (key in model) and order.get(key) == model.get(key, _GONE) for key in range(31))


def test_none_of_its_dicts_becomes_large() -> None:
    """What a dict costs that grows is in proportion to what is in it."""
    order: Order[object, None] = Order(None)
    order.extend((object() for _ in range(200_000)), None)
    assert len(order._recent) <= module._RECENT
    assert max(map(len, order._links)) < 10 * 200_000 / len(order._links)
    assert len(order) == 200_000
