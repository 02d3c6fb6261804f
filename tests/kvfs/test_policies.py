"""Policies: the order in which entries go. Pure, so a list is model enough; for what is learned, counting it all anew."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.errors import UsageError
from kvfs.policies import Holding, LeafFirstLRU, Policy
from kvfs.policies.base import Clock
from kvfs.policies.cost import weigh
from kvfs.policies.hint import Hint
from kvfs.policies.learned import Learned
from kvfs.policies.named import NAMES, maker
from kvfs.policies.reuse import EDGES, NUM_SPANS, Reuse, span_of

from .entries import Item, Table, Time, everything

LEAF_FIRST = ("learned", "cost")


class Order(RuleBasedStateMachine):
    """Leaf-first LRU against a plain list, first to go first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: LeafFirstLRU[Any] = LeafFirstLRU()
        self.order: list[int] = []
        self.next = 0

    @rule()
    def insert(self) -> None:
        self.policy.insert(self.next)
        self.order.append(self.next)
        self.next += 1

    @rule(prefix=st.lists(st.integers(0, 12), unique=True, max_size=6))
    def touch(self, prefix: list[int]) -> None:
        """The tail of a prefix goes before its head; what is not there is skipped."""
        self.policy.touch(prefix)
        there = [entry for entry in reversed(prefix) if entry in self.order]
        self.order = [entry for entry in self.order if entry not in there] + there

    @rule(entry=st.integers(0, 12))
    def remove(self, entry: int) -> None:
        self.policy.remove(entry)
        if entry in self.order:
            self.order.remove(entry)

    @precondition(lambda self: self.order)
    @rule(modulus=st.integers(1, 4))
    def some_may_not_go(self, modulus: int) -> None:
        """`victims` passes over those that may not go and changes nothing."""
        found = list(self.policy.victims(lambda entry: entry % modulus == 0))
        assert found == [entry for entry in self.order if entry % modulus == 0]

    @invariant()
    def order_is_equal(self) -> None:
        assert list(self.policy.victims(lambda _: True)) == self.order
        assert len(self.policy) == len(self.order)


Order.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestOrder = Order.TestCase


class Tier(RuleBasedStateMachine):
    """Any policy in a tier, behind `Holding`, with what a store does to it.

    Invariants: every entry of the tier is held or comes up once; what is held never does; sizes add up; two policies
    that saw the same say the same; what goes leaf first does, once what is unreachable has gone.
    """

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.time = Time()
        self.held: set[Item] = set()
        self.policy = self.make()
        self.twin = self.make()
        self.table = Table()
        self.tier: dict[Item, None] = {}
        self.unreachable: set[Item] = set()
        self.closed: set[Item] = set()
        self.random = random.Random(0)
        self.next = 0

    def make(self) -> Holding[Item]:
        return Holding(maker(self.name)(self.time), self.held.__contains__)

    def both(self, call: Callable[[Holding[Item]], object]) -> None:
        call(self.policy)
        call(self.twin)

    def pick(self, seed: int) -> Item | None:
        items = list(self.table.values())
        return items[seed % len(items)] if items else None

    @initialize(seed=st.integers(0, 1 << 16))
    def seed(self, seed: int) -> None:
        self.random = random.Random(seed)

    @rule(seed=st.integers(0, 99), count=st.integers(1, 4), in_reverse=st.booleans())
    def store(self, seed: int, count: int, in_reverse: bool) -> None:
        """A few more of a chain, as an engine stores them; after a restart they come in any order."""
        above = self.pick(seed) if seed < 80 else None
        new = []
        for _ in range(count):
            above = Item(self.table, self.next, above)
            self.next += 1
            self.table[above.key] = above
            new.append(above)
        self.open(new[0].prefix())
        for item in reversed(new) if in_reverse else new:
            self.tier[item] = None
            self.both(lambda policy, item=item: policy.insert(item))
        self.both(lambda policy: policy.built_on(new[-1].prefix()))
        self.unreachable -= set(new[-1].prefix())

    @rule(seed=st.integers(0, 99))
    def load(self, seed: int) -> None:
        item = self.pick(seed)
        if item is not None:
            prefix = item.prefix()
            for one in prefix:
                one.hits += 1
                one.hint = Hint(one.hint.class_) if one.hint else None
            self.closed -= set(prefix)
            self.both(lambda policy: policy.touch(prefix))
            self.unreachable -= set(prefix)

    @rule(seed=st.integers(0, 99))
    def promote(self, seed: int) -> None:
        """What is in another tier comes into this one."""
        item = self.pick(seed)
        if item is not None and item not in self.tier:
            self.tier[item] = None
            self.both(lambda policy: policy.insert(item))

    @rule(count=st.integers(1, 4), leased=st.integers(1, 5))
    def evict(self, count: int, leased: int) -> None:
        victims = []
        for victim in self.policy.victims(lambda item: item.number % leased == 0):
            victims.append(victim)
            if len(victims) == count:
                break
        assert victims == [
            victim
            for victim, _ in zip(self.twin.victims(lambda item: item.number % leased == 0), range(count), strict=False)
        ]
        for victim in victims:
            assert victim.number % leased == 0
            self.drop(victim)
            if self.random.random() < 0.5:
                self.forget(victim)

    @rule(seed=st.integers(0, 99))
    def discard(self, seed: int) -> None:
        """A person removes something: what is built on it cannot be reached."""
        item = self.pick(seed)
        if item is not None:
            self.drop(item)
            self.forget(item)

    def drop(self, item: Item) -> None:
        self.tier.pop(item, None)
        self.unreachable.discard(item)
        self.both(lambda policy: policy.remove(item))

    def forget(self, item: Item) -> None:
        below = [one for one in self.table.values() if item in one.prefix()[:-1]]
        del self.table[item.key]
        self.held.discard(item)
        self.both(lambda policy: policy.let_go(item))
        for one in sorted(below, key=lambda one: one.position):
            self.both(lambda policy, one=one: policy.demote(one))
            if one in self.tier and one not in self.held:
                self.unreachable.add(one)

    @rule(seed=st.integers(0, 99))
    def hold(self, seed: int) -> None:
        item = self.pick(seed)
        if item is not None and item not in self.held:
            self.held.add(item)
            self.both(lambda policy: policy.hold(item))
            self.unreachable.discard(item)

    @rule(seed=st.integers(0, 99))
    def let_go(self, seed: int) -> None:
        item = self.pick(seed)
        if item is not None and item in self.held:
            self.held.remove(item)
            self.both(lambda policy: policy.let_go(item))

    @rule(seed=st.integers(0, 99), class_=st.integers(0, 12), seconds=st.sampled_from([-1.0, 1.0, 50.0, 9000.0]))
    def hint(self, seed: int, class_: int, seconds: float) -> None:
        """The chain is of a class, and perhaps its end is expected."""
        item = self.pick(seed)
        if item is not None and item not in self.closed:
            prefix = item.prefix()
            for one in prefix:
                one.hint = Hint(class_, one.hint.until_s if one.hint else -1.0)
            item.hint = Hint(class_, self.time.now + seconds)
            self.both(lambda policy: policy.hinted(prefix))

    @rule(seed=st.integers(0, 99))
    def close(self, seed: int) -> None:
        item = self.pick(seed)
        if item is not None:
            below = [one for one in self.table.values() if item in one.prefix()]
            for one in below:
                one.hint = (one.hint or Hint())._replace(is_closed=True)
            below.sort(key=lambda one: one.position)
            self.both(lambda policy: policy.hinted(below))
            self.closed |= set(below)

    def open(self, prefix: list[Item]) -> None:
        for one in prefix:
            one.hint = (one.hint or Hint())._replace(is_closed=False)
        self.closed -= set(prefix)
        self.both(lambda policy: policy.hinted(prefix))

    @rule(seed=st.integers(0, 99))
    def bypass(self, seed: int) -> None:
        above = self.pick(seed)
        item = Item(self.table, 1 << 20 | seed, above)
        self.both(lambda policy: policy.bypassed(item))

    @rule(seconds=st.sampled_from([0.1, 3.0, 100.0, 7200.0]))
    def wait(self, seconds: float) -> None:
        self.time.now += seconds

    @invariant()
    def all_come_up_once(self) -> None:
        order = list(self.policy.victims(everything))
        assert len(order) == len(set(order))
        assert set(order) == self.tier.keys() - self.held
        assert len(self.policy) == len(self.tier)
        assert order == list(self.twin.victims(everything))
        assert set(order[: len(self.unreachable)]) == self.unreachable
        if isinstance(self.policy._order, Learned):
            check_nodes(self.policy._order)
        closed = self.closed & set(order) - self.unreachable
        num_first = len(self.unreachable) + len(closed)
        assert set(order[len(self.unreachable) : num_first]) == closed
        if self.name in LEAF_FIRST:
            place = {item: index for index, item in enumerate(order)}
            for item in order[num_first:]:
                above = item.above()
                is_first = above in order[:num_first]  # and what is built on it was held meanwhile
                assert above not in place or is_first or place[above] > place[item], f"{above} would go before {item}"


def check_nodes(policy: Learned[Item]) -> None:
    """What a node knows of itself is so."""
    nodes = {node for part in policy._forest.parts for node in part.values()}
    below: Counter[Any] = Counter(node.above for node in nodes)
    ranking, locks_of = policy._ranking, policy._protected._locks
    for node in nodes | {node.above for node in nodes if node.above is not None}:
        assert node.num_below == below[node] - len(locks_of.get(node, ()))
        assert ranking.has(node) == (node in nodes and not node.num_below)
    sorted_in = [node for leaves in ranking._leaves for there in leaves.at.values() for node in there]
    assert len({*sorted_in, ranking._latest} - {None}) == len(sorted_in) + (ranking._latest is not None) <= len(nodes)
    for above, locks in locks_of.items():
        assert locks, "one without any is dropped"
        assert all(node in nodes and node.above is above and node.group < 0 for node in locks)
    assert {node for node in nodes if node.group < 0} == policy._protected._expected._places.keys()


@pytest.mark.parametrize("name", [*NAMES])
def test_every_policy_in_a_tier(name: str) -> None:
    machine = type(f"Tier_{name}", (Tier,), {"name": name})
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    machine.TestCase().runTest()


def play(
    make: Callable[[Clock], Policy[Item]], capacity: int, seed: int, num_requests: int
) -> tuple[list[int], Policy[Item], Time]:
    """A store of equal chunks and random chats on it; what went, in order."""
    chance, time = random.Random(seed), Time()
    policy, table, gone = make(time), Table(), []
    chats: list[list[int]] = []
    number = 0
    hits: dict[int, int] = {}
    for _ in range(num_requests):
        time.now += chance.expovariate(0.5)
        if not chats or chance.random() < 0.4:
            chats.append([])
        chat = chance.choice(chats[-30:])
        found = []
        items = {item.number: item for item in table.values()}
        for one in chat:
            if one not in items:
                break
            found.append(items[one])
        for item in found:
            item.hits += 1
            hits[item.number] = item.hits
        policy.touch(found)
        chat += range(number, number + chance.randrange(1, 4))
        number = max(number, chat[-1] + 1)
        above = found[-1] if found else None
        for one in chat[len(found) :]:
            item = Item(table, one, above)
            item.hits = hits.get(one, 0)
            if item.key in table:
                above = table[item.key]
                continue
            while len(policy) >= capacity:
                victim = next(policy.victims(everything))
                policy.remove(victim)
                del table[victim.key]
                gone.append(victim.number)
            table[item.key] = item
            policy.insert(item)
            above = item
        assert above is not None
        policy.built_on(above.prefix())
    return gone, policy, time


@pytest.mark.parametrize("name", [*NAMES])
def test_the_same_requests_give_the_same_victims(name: str) -> None:
    first, _, _ = play(maker(name), 60, 1, 300)
    second, _, _ = play(maker(name), 60, 1, 300)
    assert first == second
    assert len(first) > 200


def test_the_learned_victim_has_the_least_value() -> None:
    """Of all leaves, looked at one by one; several hundred times, after much was learned."""
    looked_at = 0
    for seed in range(3):
        _, policy, time = play(Learned, 80, seed, 400)
        assert isinstance(policy, Learned)
        assert any(any(row) for row in policy._reuse.index), "nothing was learned"
        for _ in range(60):
            time.now += 3.0  # so that the lowest are sought anew
            leaves = [node for part in policy._forest.parts for node in part.values() if not node.num_below]
            victim = next(policy.victims(everything))
            values = {node.entry: policy._ranking.rank(node, policy._now())[0] for node in leaves}
            assert values[victim] == min(values.values())
            policy.remove(victim)
            looked_at += 1
    assert looked_at == 180


def test_before_anything_is_learned_it_is_leaf_first_lru() -> None:
    time, table = Time(), Table()
    learned: Learned[Item] = Learned(time)
    lru: LeafFirstLRU[Item] = LeafFirstLRU()
    chance, items = random.Random(5), []
    for number in range(60):
        time.now += 1.0
        above = chance.choice(items) if items and chance.random() < 0.7 else None
        items.append(Item(table, number, above))
        table[items[-1].key] = items[-1]
        for policy in (learned, lru):
            policy.insert(items[-1])
            policy.built_on(items[-1].prefix())
    assert list(learned.victims(everything)) == list(lru.victims(everything))


def test_reuse_learns_what_is_used_again_and_when() -> None:
    """Group 0 is used again after 10 s, always; group 1 never. So 0 is worth more while it is young, 1 nothing."""
    reuse, now = Reuse(2), 0.0
    for number in range(2000):
        watched = [reuse.came((0, (2 * number + group).to_bytes(16, "little")), group, now) for group in (0, 1)]
        assert watched[0] is not None
        reuse.used(watched[0], 0, now + 10)
        for group in (0, 1):
            reuse.left((0, (2 * number + group).to_bytes(16, "little")), now + 10)
        now += 1
    deque(reuse.rebuild(now + 100), maxlen=0)
    young, at_10 = reuse.index[0][0], reuse.index[0][span_of(10)]
    assert at_10 > young > 5 * max(reuse.index[1][:4])
    assert reuse.index[0][span_of(40)] < at_10 / 4


def test_reuse_watches_a_bounded_sample() -> None:
    reuse = Reuse(1)
    chance = random.Random(3)
    marks = [(0, chance.randbytes(16)) for _ in range(60_000)]
    watched = [reuse.came(mark, 0, float(number)) for number, mark in enumerate(marks)]
    assert len(reuse._here) <= 4096
    assert sum(one is not None and one.is_watched for one in watched) == len(reuse._here)
    for number, mark in enumerate(marks):
        reuse.left(mark, 60_000.0 + number)
    assert not reuse._here
    assert len(reuse._gone) <= 4


def test_spans() -> None:
    ages = (0.0, 0.06, 0.0625, 0.9, 1.0, 1.9, 2.0, 1e9)
    assert [span_of(age) for age in ages] == [0, 0, 1, 4, 5, 5, 6, NUM_SPANS - 1]
    assert all(span_of(edge) == span for span, edge in enumerate(EDGES))


def test_cost_prefers_what_is_deep_and_small() -> None:
    table = Table()
    head = Item(table, 0, None, length=32 << 20)
    deep = Item(table, 1, None, length=32 << 20)
    deep.position = 128
    small = Item(table, 2, None, length=8 << 20)
    assert weigh(deep) == weigh(head) + 2  # twice as dear
    assert weigh(small) == weigh(head) + 4  # a quarter of the bytes
    assert 0 <= weigh(Item(table, 3, None, length=1 << 50)) < weigh(Item(table, 4, None, length=4096)) < 32


def test_held_and_unreachable_entries_stand_beside_the_order() -> None:
    table = Table()
    items = [Item(table, number, None) for number in range(5)]
    policy: Holding[Item] = Holding(LeafFirstLRU(), lambda item: item is items[2])
    for item in items:
        policy.insert(item)
    policy.demote(items[3])
    policy.demote(items[4])
    policy.demote(items[2])  # held
    assert list(policy.victims(everything)) == [items[4], items[3], items[0], items[1]]
    policy.touch([items[3]])
    policy.hold(items[4])
    assert list(policy.victims(everything)) == [items[0], items[1], items[3]]
    policy.let_go(items[4])
    assert list(policy.victims(everything)) == [items[0], items[1], items[3], items[4]]
    assert len(policy) == 5


def test_a_users_class_is_imported_and_given_the_clock() -> None:
    time = Time()
    made: Any = maker("kvfs.policies.lfu:LFU")(time)
    assert made._clock is time


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lruu", "must be one of learned, lru, "),
        ("no.such.module:Policy", "cannot be imported"),
        ("kvfs.policies.lru:Nothing", "cannot be imported"),
        ("collections:OrderedDict", "has no insert and no touch"),
        ("../no/module:Policy", "cannot be imported"),
        ("kvfs.policies.base:Policy", "cannot be made"),
    ],
)
def test_a_policy_that_there_is_not(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        maker(name)(Time())


def test_what_was_learned_goes_on_after_a_restart() -> None:
    """With the entries' ages: the same ones go, in the same order but for ties, and it goes on learning from there."""
    _, before, time = play(Learned, 80, 7, 400)
    assert isinstance(before, Learned)
    deque(before._reuse.rebuild(time.now), maxlen=0)
    before._ranking.forget_lowest()
    before._rebuilding = None
    there = list(before.victims(everything))
    learnt = before.learnt(lambda table: str(id(table)))
    time.now += 5.0
    after: Learned[Item] = Learned(time)
    tables = {str(id(entry.table)): entry.table for entry in there}
    after.recall(learnt, tables.get)
    assert any(any(row) for row in after._reuse.index)
    holding: Holding[Item] = Holding(after)
    ages = {entry: time.now - node.last for entry in there if (node := before._forest.get(entry)) is not None}
    for entry in sorted(there, key=lambda entry: (-ages[entry], -entry.position)):
        holding.recovered(entry, ages[entry])
    assert after._reuse._used == before._reuse._used
    for entry in there:
        old, new = before._forest.get(entry), after._forest.get(entry)
        assert old is not None
        assert new is not None
        assert abs(old.last - new.last) <= 0.25
    first = {entry: place for place, entry in enumerate(there)}
    half = [first[entry] for entry in islice(holding.victims(everything), len(there) // 2)]
    assert sum(half) / len(half) < 0.35 * len(there), "what would have gone late goes early"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recovered_at_once_goes_as_what_is_recovered_one_by_one(name: str) -> None:
    """Chains and branches of them, with holes, the oldest first; some are held."""
    rng, table, entries = random.Random(5), Table(), []
    for number in range(600):
        above = rng.choice(entries) if entries and rng.random() < 0.9 else None
        entry = Item(table, number, above)
        entry.hits = rng.randrange(4)
        table[entry.key] = entry
        entries.append(entry)
    there = [entry for entry in entries if rng.random() < 0.9]
    ages = {entry: 1000.0 - entry.number for entry in there}
    there.sort(key=lambda entry: (-ages[entry] // 50, -entry.position))
    for held in (frozenset[Item](), frozenset(there[::7])):
        orders = []
        for at_once in (False, True):
            holding: Holding[Item] = Holding(maker(name)(Time()), held.__contains__)
            if at_once:
                holding.recovered_all(there, (ages[entry] for entry in there))
            else:
                for entry in there:
                    holding.recovered(entry, ages[entry])
            assert len(holding) == len(there)
            orders.append([entry.number for entry in holding.victims(everything)])
        assert orders[0] == orders[1]
        assert len(orders[0]) == len(there) - len(held)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: raw.replace(b"kvfs-learned/3", b"kvfs-learned/2"),
        lambda raw: raw.replace(b'"part":0', b'"part":2'),
        lambda raw: raw.replace(b'"used":[[', b'"used":[[1.0],['),
        lambda raw: raw.replace(b'"used":[[0.0', b'"used":[[-1.0'),
        lambda raw: raw.replace(b'"number":1', b'"number":2'),
        lambda raw: raw.replace(b'"number":1', b'"number":4000'),
        lambda raw: raw.replace(b'"classes":[]', b'"classes":[3,3]'),
        lambda raw: raw.replace(b'"classes":[]', b'"classes":[1,2,3,4,5,6,7,8]'),
        lambda raw: raw.replace(b'"classes":[]', b'"classes":[0]'),
    ],
)
def test_what_cannot_have_been_learned_is_forgotten(damage: Callable[[bytes], bytes]) -> None:
    time, table = Time(), Table()
    before: Learned[Item] = Learned(time)
    before.insert(Item(table, 1, None))
    raw = before.learnt(lambda _: "t")
    assert damage(raw) != raw
    after: Learned[Item] = Learned(time)
    with pytest.raises(UsageError, match="what was learned"):
        after.recall(damage(raw), {"t": table}.get)
    after.insert(Item(table, 2, None))
    assert len(list(after.victims(everything))) == 1


def test_what_another_policy_learned_is_not_taken() -> None:
    weighed: Any = maker("cost")(Time())
    with pytest.raises(UsageError, match="of another policy"):
        Learned(Time()).recall(weighed.learnt(str), {}.get)
    assert Holding(LeafFirstLRU[Item]()).learnt(str) is None
