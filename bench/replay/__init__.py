"""A trace of requests against the real cache, under a virtual clock: what is reused, what it costs, what is lost."""
