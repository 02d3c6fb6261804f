"""Policies: which entry of a tier goes first. Pure data structures: no I/O, no clock, no waiting, all or nothing."""

from kvfs.policies.base import Policy
from kvfs.policies.holding import Holding
from kvfs.policies.lru import LeafFirstLRU

__all__ = ["Holding", "LeafFirstLRU", "Policy"]
