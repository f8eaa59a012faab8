"""The store of a job: where its ranks find each other, served beside them by whoever started them.

It is not torch's own: that one knows no key, grows for anyone who can reach it, and dies with the rank that
serves it. This one lives in the launcher, is reached by a socket that a rank is born with, or, from another
node, by a connection whose both ends have shown that they know the key; and it knows which members are gone.
"""

from paceline.store.client import Late, Lost, StoreClient
from paceline.store.server import StoreServer

__all__ = ["Late", "Lost", "StoreClient", "StoreServer"]
