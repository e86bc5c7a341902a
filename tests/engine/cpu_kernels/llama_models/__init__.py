"""The two architectures of the tiny pair, SGLang's own, for SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang then imports its 200 other model files only when it needs one: each process starts seconds
earlier.
"""
