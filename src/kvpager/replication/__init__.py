"""What another machine needs to go on with this one's requests: a lease, a journal in Redis, and its mirror."""
