"""Policies: which entry of a tier goes first. Pure data structures: no I/O, no waiting, all or nothing.

A policy knows the time only by the clock that it is given. What is pinned, or cannot be reached any more, is kept from
it by `Holding`; quotas, ages and leases are the affair of whoever asks for victims.
"""

from kvfs.policies.base import Clock, Entry, Policy
from kvfs.policies.holding import Holding
from kvfs.policies.lru import LeafFirstLRU

__all__ = ["Clock", "Entry", "Holding", "LeafFirstLRU", "Policy"]
