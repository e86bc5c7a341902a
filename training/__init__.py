"""Fitting calibrations, training policies and comparing them with baselines.

It may import ``env`` and ``controller``, never ``engine_hooks``.
"""
