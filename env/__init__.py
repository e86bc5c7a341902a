"""The simulated server that policies are trained and compared on. Only this package owns dynamics.

It may import ``controller``, never ``training`` or ``engine_hooks``.
"""
