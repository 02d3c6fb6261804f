"""`kvfs bench peers`: LMCache's storage backends beside ours, on the same device, in the same run."""
