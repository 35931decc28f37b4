"""The page store: what is shared, what is kept, what is evicted, and that no page is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.engine.pages import UNUSED, PageStore

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 9, 9, 9)


def test_a_prompt_is_stored_once():
    store = PageStore(10, 4)
    first, stored = store.hold(A + B + C[:2])
    assert stored == 0 and [node.ids for node in first] == [A, B, C[:2]]
    again, stored = store.hold(A + B + C[:2])
    assert stored == 3 and again == first
    assert store.available == 9 - 3


def test_prompts_that_begin_alike_share_their_whole_first_pages():
    store = PageStore(10, 4)
    first, _ = store.hold(A + B)
    second, stored = store.hold(A + C)
    assert stored == 1 and second[0] is first[0] and second[1] is not first[1]
    third, stored = store.hold(A + B[:3])  # a part of a page is another page
    assert stored == 1 and third[1].page not in (first[1].page, second[1].page)
    assert [node.ids for node in store.lookup(B)] == []  # the same ids, but not at the start


def test_released_prompts_are_found_again_until_their_room_is_needed():
    store = PageStore(6, 4)
    nodes, _ = store.hold(A + B)
    store.release(nodes)
    assert (store.available, store.stored) == (5, 2)
    assert store.hold(A + B)[0] == nodes
    assert store.stored == 0
    store.release(nodes)
    store.take(4)  # one more than the free ones: the end of the prompt goes, not its beginning
    assert [node.ids for node in store.lookup(A + B)] == [A]


def test_what_is_unused_for_longest_goes_first():
    store = PageStore(4, 4)
    held = {key: store.hold(key)[0] for key in (A, B, C)}
    for key in (A, B, C):
        store.release(held[key])
    store.release(store.hold(A)[0])  # used again
    store.take(1)
    assert [bool(store.lookup(key)) for key in (A, B, C)] == [True, False, True]


def test_the_bound_on_what_is_kept():
    store = PageStore(10, 4, kept=1)
    store.release(store.hold(A + B + C)[0])
    assert store.stored == 1 and [node.ids for node in store.lookup(A + B + C)] == [A]
    nothing = PageStore(10, 4, kept=0)
    nothing.release(nothing.hold(A)[0])
    assert nothing.stored == 0 and nothing.available == 9


def test_held_pages_are_never_evicted():
    store = PageStore(4, 4)
    held, _ = store.hold(A + B)
    store.take(1)
    assert store.available == 0
    assert store.fits(A + B, 0) and not store.fits(A + B, 1) and not store.fits(C, 0)
    assert store.lookup(A + B) == held


def test_a_stored_prompt_that_is_held_again_leaves_no_room():
    """It counts as available until then: a request must not count it twice."""
    store = PageStore(3, 4)
    store.release(store.hold(A)[0])
    assert store.available == 2
    assert store.fits(A, 1) and not store.fits(A, 2) and store.fits((), 2)


def test_clear_forgets_every_prompt():
    store = PageStore(10, 4)
    store.release(store.hold(A + B)[0])
    store.clear()
    assert store.lookup(A) == [] and (store.stored, store.available) == (0, 9)


def test_without_sharing_every_request_has_its_own():
    store = PageStore(10, 4, sharing=False)
    (first, _), (second, stored) = store.hold(A + B), store.hold(A + B)
    assert stored == 0 and not {n.page for n in first} & {n.page for n in second}
    store.release(first)
    store.release(second)
    assert (store.available, store.stored) == (9, 0)


PROMPTS = st.lists(st.integers(0, 1), max_size=7)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(PROMPTS, st.integers(0, 5)), max_size=40),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_no_page_is_lost_or_given_twice(actions, kept, sharing):
    """Prompts are held and requests ended at random; at every moment each page has one use."""
    store = PageStore(12, 2, kept, sharing)
    running = []
    for action in actions:
        if isinstance(action, int):
            if running:
                nodes, own = running.pop(action % len(running))
                store.release(nodes)
                store.give_back(own)
        elif store.fits(action, 1):
            nodes, _ = store.hold(action)
            assert [i for node in nodes for i in node.ids] == action
            running.append((nodes, store.take(1)))
        else:
            assert running  # a prompt of four pages fits into an empty store of eleven
        used = {node.page for nodes, _ in running for node in nodes}
        own = [page for _, pages in running for page in pages]
        assert len(own) == len(set(own)) and not used & set(own) and UNUSED not in used | set(own)
        assert store.available == 11 - len(used) - len(own)
        if kept is not None:
            assert store.stored <= kept
    for nodes, own in running:
        store.release(nodes)
        store.give_back(own)
    assert store.available == 11


@pytest.mark.parametrize("size, pages", [(1, 5), (4, 2), (5, 1), (64, 1)])
def test_pages_of_a_prompt(size, pages):
    nodes, _ = PageStore(10, size).hold((1, 2, 3, 4, 5))
    assert len(nodes) == pages and sum(len(node.ids) for node in nodes) == 5
