"""Attention over a context-parallel share; each backend is a module, imported when it is used.

``allgather``   gathers keys and values over the ring and masks by document and position; takes any layout
"""
