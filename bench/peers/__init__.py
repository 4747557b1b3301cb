"""Disk tiers side by side: each behind the same few calls, for `bench/integrity.py`.

`contract` says what the calls are, `scenes` what is done to a tier, `speed` how it is timed; one module for
each product. Only the module of a product imports it: each runs under a Python of its own.
"""
