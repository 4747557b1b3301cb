"""Kernels of the manager's methods. Each kernel processes one batch of a request's keys.

A kernel takes a cache, a request's path and a batch, and returns a number. Kernels decide nothing: the
policy's functions, called by address, choose the victims.

Import a module of this package, not a kernel: compilation replaces the kernel in its module by another object
(`structures.jit.Kernel`), and an imported name would still refer to the old object.
"""
