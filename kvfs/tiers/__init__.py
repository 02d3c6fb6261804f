"""Tiers: a flat space of bytes each, with an extent allocator and a policy. `kvfs.store` moves chunks between them."""
