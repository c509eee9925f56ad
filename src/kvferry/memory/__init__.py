"""Memory: allocating it so that a peer can map it, and copying lists of spans of it.

``host`` owns shareable host memory, ``copy`` moves spans inside this process. Neither knows a
peer, a transport or a deadline.
"""
