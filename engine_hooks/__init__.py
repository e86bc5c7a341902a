"""The SGLang plugin: it asks the controller for a tier on every decode round and records traces.

Nothing here imports SGLang until a server loads the plugin. It may import ``controller`` only.
"""
