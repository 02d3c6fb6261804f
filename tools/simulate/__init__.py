"""`kvfs simulate`: what a cache of a given size, with a given policy, would have done for recorded requests."""
