"""`kvfs bench`: what each path reaches, beside the limit of the hardware measured in the same run."""
