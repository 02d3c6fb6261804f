"""`kvfs doctor`: what of kvfs this machine can do, and why not."""
