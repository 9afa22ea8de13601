"""Workers that come and go, and share one address.

Reading begins in `pool`. `admission` is the way in: a channel beside the sender's transport, by
which a worker that comes is given an id.
"""
