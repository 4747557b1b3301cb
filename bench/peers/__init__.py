"""Adapters of cache tiers to one interface, for `bench/integrity.py`.

`contract` defines the interface, `scenes` damages tiers, `speed` times them. Each product has one module;
only this module imports the product, because each product runs in its own Python.
"""
