"""What the decision path needs: tiers, trace schema, calibration, features, policy, checkpoint.

Nothing here imports ``env``, ``training`` or ``engine_hooks``, nor PyTorch or SGLang.
"""

__version__ = "0.1.0"
